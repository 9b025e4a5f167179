"""Small programs in the shape of published training scripts, each with its own way of resuming.

A program trains, saves, builds everything anew, loads, and trains on. Run plain it does neither
save nor load. It returns its losses: sharded runs must have those of one process.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn import functional as F

import onefold
from tests.support.ranks import seeded

ROWS = 12
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass
class Run:
    """One process of a program; `stage` None: plain, alone."""

    folder: Path
    stage: int | None = None
    rank: int = 0
    world_size: int = 1
    losses: list[float] = field(default_factory=list)

    @property
    def is_plain(self) -> bool:
        return self.stage is None

    def shard(self, module: nn.Module, optimizer: Any = None) -> None:
        if self.stage is not None:
            onefold.shard(module, optimizer, stage=self.stage)

    def own(self, *batch: Tensor) -> list[Tensor]:
        """The rows of this process."""
        return [tensor.chunk(self.world_size)[self.rank] for tensor in batch]

    def note(self, loss: Tensor) -> None:
        """Keep the mean of all ranks."""
        mean = loss.detach().clone()
        if self.world_size > 1:
            dist.all_reduce(mean)
        self.losses.append(mean.item() / self.world_size)

    def on_rank_0(self, name: str, state: Any) -> Any:
        """Write a file on rank 0 and read it on every rank."""
        if self.rank == 0:
            torch.save(state, self.folder / name)
        if self.world_size > 1:
            dist.barrier()
        return torch.load(self.folder / name)


def numbers(*shape: int, steps: int = 4) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(len(shape))
    for _ in range(steps):
        yield torch.rand(ROWS, *shape, generator=generator)


def letters(length: int, steps: int = 4) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(length)
    for _ in range(steps):
        yield torch.randint(0, 11, (ROWS, length), generator=generator)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 13), nn.GELU())
        self.out = nn.Linear(13, width)

    def forward(self, x: Tensor) -> Tensor:
        y, length = self.norm(x), x.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.out(self.mlp(x))


class Letters(nn.Module):
    """A causal transformer whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def letters_by_micro_batches(run: Run) -> None:
    """Decay by dimension, two micro-batches a step, clipping; one file of plain tensors."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = seeded(Letters)
        groups = [
            [p for p in model.parameters() if (p.dim() > 1) is wide] for wide in (True, False)
        ]
        optimizer = torch.optim.AdamW(
            [{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "weight_decay": 0}],
            lr=1e-2, eps=1e-4,
        )  # fmt: skip
        run.shard(model, optimizer)
        return model, optimizer

    model, optimizer = build()
    for index, tokens in enumerate(letters(6)):
        if index == 2 and not run.is_plain:
            state = {
                "model": onefold.full_state_dict(model),
                "optimizer": get_optimizer_state_dict(model, optimizer, options=FULL),
            }
            state = run.on_rank_0("letters.pt", state)
            model, optimizer = build()
            model.load_state_dict(state["model"])
            set_optimizer_state_dict(model, optimizer, state["optimizer"], options=FULL)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + index)
        first, last = tokens.chunk(2)
        if run.is_plain:
            (model(first) / 2).backward()
        else:
            with onefold.accumulate(model):
                (model(*run.own(first)) / 2).backward()
        loss = model(*run.own(last)) / 2
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        run.note(loss)


class Words(nn.Module):
    """A recurrent model whose hidden state is made of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.rnn = nn.LSTM(5, 6, 2, batch_first=True)
        self.out = nn.Linear(6, 11)

    def forward(self, tokens: Tensor, hidden: Any) -> Any:
        output, hidden = self.rnn(self.embed(tokens), hidden)
        return self.out(output), hidden

    def begin(self, rows: int) -> tuple[Tensor, Tensor]:
        weight = next(self.parameters())
        return weight.new_zeros(2, rows, 6), weight.new_zeros(2, rows, 6)


def words_stepped_by_hand(run: Run) -> None:
    """Hidden states from step to step, no optimizer; the weights alone in one file."""

    def build() -> nn.Module:
        model = seeded(Words)
        run.shard(model)
        return model

    model = build()
    hidden = model.begin(ROWS // run.world_size)
    for index, tokens in enumerate(letters(5)):
        if index == 2 and not run.is_plain:
            state = run.on_rank_0("words.pt", onefold.full_state_dict(model))
            model = build()
            model.load_state_dict(state)
        (own,) = run.own(tokens)
        model.zero_grad()
        hidden = tuple(part.detach() for part in hidden)
        output, hidden = model(own[:, :-1], hidden)
        loss = F.cross_entropy(output.flatten(0, 1), own[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-0.5)
        run.note(loss)


def pictures(run: Run) -> None:
    """Convolutions, momentum and a schedule, with evaluation; `onefold.save` and `onefold.load`."""

    def build() -> tuple[nn.Module, Any, Any]:
        model = seeded(
            lambda: nn.Sequential(
                nn.Conv2d(1, 5, 3, stride=2), nn.GroupNorm(1, 5), nn.ReLU(), nn.Flatten(),
                nn.Linear(45, 3),
            )
        )  # fmt: skip
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
        run.shard(model, optimizer)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    model, optimizer, schedule = build()
    for index, images in enumerate(numbers(1, 8, 8)):
        if index == 2 and not run.is_plain:
            onefold.save(run.folder / "pictures", model, optimizer, extra=schedule.state_dict())
            model, optimizer, schedule = build()
            schedule.load_state_dict(onefold.load(run.folder / "pictures", model, optimizer))
        labels = (images.flatten(1).sum(1) * 10).long() % 3
        own, wanted = run.own(images, labels)
        model.train()
        loss = F.cross_entropy(model(own), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        model.eval()
        with torch.no_grad():
            run.note(F.cross_entropy(model(own), wanted))


class Codes(nn.Module):
    """A variational autoencoder; its noise is part of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(9, 7), nn.ReLU())
        self.mean, self.spread = nn.Linear(7, 2), nn.Linear(7, 2)
        self.decoder = nn.Sequential(nn.Linear(2, 7), nn.ReLU(), nn.Linear(7, 9), nn.Sigmoid())

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.encoder(x)
        mean, spread = self.mean(h), self.spread(h)
        return self.decoder(mean + noise * (spread / 2).exp()), mean, spread


def codes(run: Run) -> None:
    """A loss that is a sum; each rank keeps its own part of the optimizer's state."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = seeded(Codes)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4)
        run.shard(model, optimizer)
        return model, optimizer

    model, optimizer = build()
    for index, (x, noise) in enumerate(zip(numbers(9), numbers(2), strict=True)):
        if index == 2 and not run.is_plain:
            file = io.BytesIO()
            torch.save([model.state_dict(), optimizer.state_dict()], file)
            file.seek(0)
            model, optimizer = build()
            for part, state in zip((model, optimizer), torch.load(file), strict=True):
                part.load_state_dict(state)
        x, noise = run.own(x, noise)
        output, mean, spread = model(x, noise)
        divergence = (1 + spread - mean.square() - spread.exp()).sum() / -2
        loss = F.binary_cross_entropy(output, x, reduction="sum") + divergence
        loss = loss * run.world_size
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.note(loss)


def adversaries(run: Run) -> None:
    """Two models with an optimizer each, of which one is frozen in turns and clamped."""

    def start(part: nn.Module) -> None:
        if isinstance(part, nn.Linear):
            nn.init.constant_(part.weight, 0.3)
            nn.init.zeros_(part.bias)

    def build() -> list[Any]:
        maker = seeded(lambda: nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 5)))
        critic = seeded(
            lambda: nn.Sequential(
                nn.utils.parametrizations.spectral_norm(nn.Linear(5, 7)), nn.Tanh(), nn.Linear(7, 1)
            )
        )
        optimizers = []
        for model in (maker, critic):
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.5, 0.9), eps=1e-4)
            run.shard(model, optimizer)
            optimizers.append(optimizer)
        maker.apply(start)
        return [maker, critic, *optimizers]

    maker, critic, of_maker, of_critic = build()
    for index, (noise, real) in enumerate(zip(numbers(3), numbers(5), strict=True)):
        if index == 2 and not run.is_plain:
            onefold.save(run.folder / "maker", maker, of_maker)
            onefold.save(run.folder / "critic", critic, of_critic)
            maker, critic, of_maker, of_critic = build()
            onefold.load(run.folder / "maker", maker, of_maker)
            onefold.load(run.folder / "critic", critic, of_critic)
        noise, real = run.own(noise, real)
        critic.requires_grad_(True)
        critic.zero_grad()
        (critic(maker(noise).detach()).mean() - critic(real).mean()).backward()
        of_critic.step()
        for p in critic.parameters():
            p.data.clamp_(-0.5, 0.5)
        critic.requires_grad_(False)
        maker.zero_grad()
        loss = -critic(maker(noise)).mean()
        loss.backward()
        of_maker.step()
        run.note(loss)


class Denoiser(nn.Module):
    """Predicts noise from a noisy row and a class, whose table is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.classes = nn.Embedding(3, 6).requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x + self.classes(kind)))
        return x


def denoiser(run: Run) -> None:
    """An average updated with gradients on, a penalty on all weights; torch's own checkpoints."""

    def build() -> tuple[nn.Module, Any, dict[str, Tensor]]:
        model = seeded(Denoiser)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2, eps=1e-4)
        run.shard(model, optimizer)
        return model, optimizer, {n: p.detach().clone() for n, p in model.named_parameters()}

    model, optimizer, average = build()
    for index, noise in enumerate(numbers(6)):
        if index == 2 and not run.is_plain:
            state = {"model": model.state_dict(), "average": average}
            state["optimizer"] = get_optimizer_state_dict(model, optimizer)
            dcp.save(state, checkpoint_id=run.folder / "denoiser")
            model, optimizer, average = build()
            state = {"model": model.state_dict(), "average": average}
            state["optimizer"] = get_optimizer_state_dict(model, optimizer)
            dcp.load(state, checkpoint_id=run.folder / "denoiser")
            model.load_state_dict(state["model"])
            set_optimizer_state_dict(model, optimizer, state["optimizer"])
        noise, kind = run.own(noise, torch.arange(ROWS) % 3)
        loss = F.mse_loss(model(noise.sqrt(), kind), noise)
        loss = loss + 1e-2 * sum(p.pow(2).sum() for p in model.parameters())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for name, p in model.named_parameters():
            average[name].lerp_(p, 0.1)
        run.note(loss)
    for p, mean in zip(model.parameters(), average.values(), strict=True):
        with torch.no_grad():
            p.copy_(mean)
    run.note(F.mse_loss(model(noise.sqrt(), kind), noise))


PROGRAMS: list[Callable[[Run], None]] = [
    letters_by_micro_batches, words_stepped_by_hand, pictures, codes, adversaries, denoiser,
]  # fmt: skip
