"""Law 6: any module trains sharded as it does in one process; one test for each clause."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import (
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import onefold
from tests.support.ranks import run_ranks, seeded
from tests.support.zoo import (
    ROWS,
    WIDTH,
    Process,
    Residual,
    Tower,
    adamw,
    adamw_of_trainable,
    every_world,
    law_1,
    law_1_of_sums,
    odd_worlds,
    rows,
    run_plain,
    squared,
    tokens,
    training,
)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def linear(out: int = WIDTH) -> nn.Linear:
    return nn.Linear(WIDTH, out)


class From(nn.Module):
    """A module from its children and a function of itself and the input."""

    def __init__(self, forward: Callable[..., Any], **children: Any) -> None:
        super().__init__()
        self._forward = forward
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(self, *args, **kwargs)


def blocks(count: int = 2) -> nn.ModuleList:
    return nn.ModuleList(Residual() for _ in range(count))


def through(layers: Any, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


# tied parameters


@every_world
def test_a_head_tied_to_the_embedding_trains(world_size):
    def build():
        net = From(
            lambda self, x: self.head(through(self.blocks, self.embed(x))),
            embed=nn.Embedding(20, WIDTH), blocks=blocks(), head=nn.Linear(WIDTH, 20, bias=False),
        )  # fmt: skip
        net.head.weight = net.embed.weight
        return net

    law_1(world_size, training(build, batches=tokens()))


@every_world
def test_a_weight_tied_between_two_blocks_trains(world_size):
    def build():
        tower = Tower(3)
        tower.blocks[2].up.weight = tower.blocks[0].up.weight
        tower.blocks[2].up.bias = tower.blocks[0].up.bias
        return tower

    law_1(world_size, training(build))


@every_world
def test_a_weight_tied_between_a_block_and_the_rest_trains(world_size):
    def build():
        tower = Tower(2)
        tower.square = nn.Linear(WIDTH, 7)
        tower.square.weight = tower.blocks[1].up.weight
        return tower

    def loss(module):
        return lambda part: module(part).square().mean() + module.square(part).square().mean()

    law_1(world_size, training(build, loss))


@every_world
def test_a_three_way_tie_trains(world_size):
    def build():
        net = From(
            lambda self, x: self.c(torch.tanh(self.b(torch.tanh(self.a(x))))),
            a=linear(), b=linear(), c=linear(),
        )  # fmt: skip
        net.b.weight = net.c.weight = net.a.weight
        return net

    law_1(world_size, training(build))


@every_world
def test_a_tied_module_under_two_names_trains(world_size):
    def build():
        shared = Residual()
        return From(
            lambda self, x: through([*self.one, *self.two], x),
            one=nn.ModuleList([shared, Residual()]), two=nn.ModuleList([Residual(), shared]),
        )  # fmt: skip

    law_1(world_size, training(build))


# frozen parameters


@every_world
def test_a_frozen_module_keeps_its_values_and_has_no_gradient(world_size):
    def build():
        tower = Tower()
        tower.blocks[0].requires_grad_(False)
        tower.first.requires_grad_(False)
        return tower

    law_1(world_size, training(build))


@every_world
def test_a_frozen_part_of_a_unit_keeps_its_values(world_size):
    def build():
        tower = Tower()
        for block in tower.blocks:
            block.up.weight.requires_grad_(False)
            block.down.bias.requires_grad_(False)
        tower.last.weight.requires_grad_(False)
        return tower

    law_1(world_size, training(build))


class Adapted(nn.Module):
    """A frozen weight with a trainable low-rank path beside it, as LoRA has."""

    def __init__(self) -> None:
        super().__init__()
        self.base = linear()
        self.base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, WIDTH) / 3)
        self.b = nn.Parameter(torch.randn(WIDTH, 2) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x) + F.linear(F.linear(x, self.a), self.b))


@every_world
@pytest.mark.parametrize("optimizer", [adamw, adamw_of_trainable])
def test_low_rank_adapters_beside_a_frozen_base_train(world_size, optimizer):
    def build():
        return From(
            lambda self, x: self.head(through(self.blocks, self.first(x))),
            first=linear(), blocks=nn.ModuleList(Adapted() for _ in range(3)),
            head=linear().requires_grad_(False),
        )  # fmt: skip

    law_1(world_size, training(build, optimizer=optimizer))


@every_world
def test_a_frozen_base_is_whole_after_all_adapter_gradients_are_complete(world_size):
    """The adapters act on the block's output, so their gradients are complete first."""

    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Sequential(linear(), nn.Tanh(), linear()).requires_grad_(False)
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x):
            return self.base(x) * self.scale

    def build():
        return From(
            lambda self, x: through(self.blocks, self.first(x)),
            first=linear(), blocks=nn.ModuleList(Late() for _ in range(2)),
        )  # fmt: skip

    law_1(world_size, training(build))


@every_world
def test_requires_grad_may_change_between_steps(world_size):
    def script(process: Process) -> None:
        module, optimizer = process.ready(Tower)
        for index, batch in enumerate(rows(4)):
            module.blocks[0].requires_grad_(index in (0, 3))
            module.last.bias.requires_grad_(index != 1)
            process.step(index, module, optimizer, squared(module), batch)
        process.note_weights(module)

    law_1(world_size, script)


@every_world
def test_a_module_frozen_at_first_may_be_unfrozen(world_size):
    def build():
        return Tower().requires_grad_(False)

    def script(process: Process) -> None:
        module, optimizer = process.ready(build)
        module.last.requires_grad_(True)
        for index, batch in enumerate(rows(3)):
            process.step(index, module, optimizer, squared(module), batch)
            module.blocks.requires_grad_(True)
        process.note_weights(module)

    law_1(world_size, script)


@every_world
def test_a_wholly_frozen_module_passes_gradients_to_its_input(world_size):
    def script(process: Process) -> None:
        frozen, _ = process.ready(lambda: Tower().requires_grad_(False))
        module, optimizer = process.ready(linear)
        for index, batch in enumerate(rows()):
            process.step(
                index, module, optimizer, lambda x: frozen(module(x)).square().mean(), batch
            )
        process.note_weights(module)
        process.note_weights(frozen, "frozen")

    law_1(world_size, script)


# unused parameters


@every_world
def test_parameters_unused_on_every_rank_have_no_gradient_and_do_not_decay(world_size):
    def build():
        tower = Tower()
        tower.blocks[0].spare = linear()
        tower.spare = nn.Parameter(torch.ones(5, 3))
        tower.island = nn.Sequential(linear(), linear())
        return tower

    def optimizer(module):
        return torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.5)

    law_1(world_size, training(build, optimizer=optimizer))


def by_half() -> list[tuple[Tensor, Tensor]]:
    """Rows with a mark that is 0 on the first ranks and 1 on the last ones (on 1 rank: 0)."""
    marks = (torch.arange(ROWS) >= ROWS // 2).float()
    return [(batch, marks) for batch in rows()]


class Choosing(nn.Module):
    """Uses one of two layers, as the first row's mark says; both ways within one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.never = linear(), linear(), linear()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, mark: Tensor) -> Tensor:
        return torch.tanh(self.two(x) * self.scale if mark[0] else self.one(x))


def marked(module: nn.Module) -> Callable[[tuple[Tensor, Tensor]], Tensor]:
    return lambda part: (module(*part) - 1).square().mean()


@every_world
def test_parameters_used_on_some_ranks_only_have_the_mean_gradient(world_size):
    script = training(Choosing, marked, batches=by_half(), units=[])
    law_1(world_size, script, fine_units=False, by_part=True)


@every_world
def test_several_units_used_in_part_by_some_ranks_have_the_mean_gradient(world_size):
    """One rank completes a unit that another never does; their collectives must still agree."""

    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.always, self.sometimes = linear(), linear()

        def forward(self, x, mark):
            x = torch.tanh(self.always(x))
            return torch.tanh(self.sometimes(x)) if mark[0] else x

    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = linear()
            self.blocks = nn.ModuleList(Partly() for _ in range(3))
            self.last = linear(3)

        def forward(self, x, mark):
            x = self.first(x)
            for block in self.blocks:
                x = block(x, mark)
            return self.last(x)

    script = training(Root, marked, batches=by_half())
    law_1(world_size, script, fine_units=False, by_part=True)


@every_world
def test_a_parameter_unused_in_one_step_is_used_in_the_next(world_size):
    class Sometimes(Tower):
        skips = False

        def forward(self, x):
            x = self.first(x)
            x = self.blocks[0](x)
            return self.last(x if self.skips else self.blocks[1](x))

    def script(process: Process) -> None:
        module, optimizer = process.ready(Sometimes)
        for index, batch in enumerate(rows(5)):
            module.skips = index in (0, 2, 3)
            process.step(index, module, optimizer, squared(module), batch)
        process.note_weights(module)

    law_1(world_size, script)


@every_world
def test_part_of_a_unit_unused_in_one_step_keeps_its_moments(world_size):
    class Sometimes(nn.Module):
        skips = False

        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = linear(), linear(), linear()

        def forward(self, x):
            x = torch.tanh(self.a(x))
            return self.c(x if self.skips else torch.tanh(self.b(x)))

    def script(process: Process) -> None:
        module, optimizer = process.ready(Sometimes)
        for index, batch in enumerate(rows(5)):
            module.skips = index in (0, 2, 3)
            process.step(index, module, optimizer, squared(module), batch)
        process.note_weights(module)

    law_1(world_size, script)


@every_world
def test_an_output_that_the_loss_does_not_use_gives_no_gradient(world_size):
    def build():
        return From(
            lambda self, x: (self.used(x), self.unused(x)), used=Residual(), unused=Residual()
        )

    law_1(world_size, training(build, lambda m: lambda x: m(x)[0].square().mean()))


# odd shapes


@every_world
def test_scalar_parameters_train(world_size):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = linear()
            self.scale = nn.Parameter(torch.tensor(0.5))
            self.shift = nn.Parameter(torch.tensor(-0.25))

        def forward(self, x):
            return self.inner(x) * self.scale + self.shift

    def build():
        return From(
            lambda self, x: through(self.blocks, x) * self.gain,
            blocks=nn.ModuleList(Scaled() for _ in range(2)),
            gain=nn.Parameter(torch.tensor(2.0)),
        )

    law_1(world_size, training(build))


@every_world
def test_a_module_of_one_scalar_trains(world_size):
    def build():
        return From(lambda self, x: x * self.gain, gain=nn.Parameter(torch.tensor(2.0)))

    law_1(world_size, training(build))


@every_world
def test_empty_parameters_are_carried_along(world_size):
    class Hollow(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = linear()
            self.none = nn.Parameter(torch.zeros(0))
            self.no_rows = nn.Parameter(torch.zeros(0, 4))
            self.no_columns = nn.Parameter(torch.zeros(5, 0))

        def forward(self, x):
            empties = self.none.sum() + self.no_rows.sum() + self.no_columns.sum()
            return self.inner(x) + empties

    def build():
        return From(
            lambda self, x: through(self.blocks, x) + self.hollow.sum(),
            blocks=nn.ModuleList(Hollow() for _ in range(2)), hollow=nn.Parameter(torch.zeros(0)),
        )  # fmt: skip

    law_1(world_size, training(build))


@every_world
def test_a_module_without_parameters_runs(world_size):
    def script(process: Process) -> None:
        module = nn.Sequential(nn.Tanh())
        if not process.is_plain:
            onefold.shard(module, stage=process.stage)
        process.note_mean("loss", process.mean(lambda x: module(x).mean(), rows()[0]))

    law_1(world_size, script, fine_units=False)


@every_world
def test_parameters_with_fewer_rows_than_ranks_train(world_size):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.row = nn.Parameter(torch.randn(1, WIDTH))
            self.two_rows = nn.Parameter(torch.randn(2, WIDTH))
            self.one = nn.Parameter(torch.randn(1))
            self.five = nn.Parameter(torch.randn(5, 1, 1, WIDTH))

        def forward(self, x):
            return x * self.row + self.two_rows.sum(0) * self.one + self.five.sum((0, 1, 2))

    def build():
        return From(
            lambda self, x: self.out(through(self.blocks, x)),
            blocks=nn.ModuleList(Odd() for _ in range(2)), out=nn.Linear(WIDTH, 1),
        )  # fmt: skip

    law_1(world_size, training(build))


@every_world
def test_convolutions_and_batch_norm_train(world_size):
    def build():
        return nn.Sequential(
            nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 5, 3, padding=1), nn.BatchNorm1d(5), nn.ReLU(),
            nn.ConvTranspose1d(5, 2, 3, padding=1), nn.GroupNorm(1, 2), nn.Flatten(),
        )  # fmt: skip

    law_1(world_size, training(build, optimizer=sgd), by_part=True)


@every_world
def test_a_noncontiguous_parameter_trains(world_size):
    def build():
        return From(
            lambda self, x: x @ self.weight, weight=nn.Parameter(torch.randn(WIDTH, WIDTH).t())
        )

    law_1(world_size, training(build))


@every_world
def test_parameters_of_several_dtypes_train(world_size):
    def build():
        net = From(
            lambda self, x: self.last(self.quantized(self.low(x.bfloat16()).float()) * self.scale),
            low=nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16),
            quantized=From(lambda self, x: x * self.codes.float(), codes=nn.Parameter(
                torch.arange(WIDTH, dtype=torch.uint8), requires_grad=False)),
            scale=nn.Parameter(torch.ones(WIDTH, dtype=torch.float64)),
            last=linear().double(),
        )  # fmt: skip
        return net

    def script(process: Process) -> None:
        module, optimizer = process.ready(build, sgd, precision=None)
        process.step(0, module, optimizer, squared(module), rows()[0])

    # bf16 gradients are rounded per part: fp32 accuracy is not to be had against one process
    law_1(world_size, script, relative=1e-3, fine_units=False)


@every_world
def test_complex_parameters_train(world_size):
    def build():
        return From(
            lambda self, x: torch.fft.irfft(torch.fft.rfft(x) * self.filter),
            filter=nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64)),
        )

    law_1(world_size, training(build, optimizer=sgd))


# modules called twice, in loops, by weight, or not at all


@every_world
def test_a_module_called_twice_in_one_forward_trains(world_size):
    class Twice(Tower):
        def forward(self, x):
            x = self.blocks[1](self.blocks[0](self.first(x)))
            return self.last(self.blocks[1](self.blocks[0](x)))

    law_1(world_size, training(Twice))


@every_world
def test_a_module_called_in_a_loop_of_changing_length_trains(world_size):
    class Looped(Tower):
        times = 1

        def forward(self, x):
            x = self.first(x)
            for _ in range(self.times):
                x = self.blocks[0](x)
            return self.last(x)

    def script(process: Process) -> None:
        module, optimizer = process.ready(Looped)
        for index, batch in enumerate(rows(3)):
            module.times = (3, 1, 2)[index]
            process.step(index, module, optimizer, squared(module), batch)
        process.note_weights(module)

    law_1(world_size, script)


@every_world
def test_the_order_of_modules_may_change_between_steps(world_size):
    class Shuffled(Tower):
        order = (0, 1, 2)

        def forward(self, x):
            x = self.first(x)
            for index in self.order:
                x = self.blocks[index](x)
            return self.last(x)

    def script(process: Process) -> None:
        module, optimizer = process.ready(partial(Shuffled, 3))
        for index, batch in enumerate(rows(4)):
            module.order = ((0, 1, 2), (2, 0), (1, 1, 0), (2, 1, 0))[index]
            process.step(index, module, optimizer, squared(module), batch)
        process.note_weights(module)

    law_1(world_size, script)


@every_world
def test_a_recursive_call_of_the_root_trains(world_size):
    class Recursive(Tower):
        def forward(self, x, depth=2):
            x = through(self.blocks, self.first(x))
            return self(x, depth - 1) if depth else self.last(x)

    law_1(world_size, training(Recursive))


@every_world
def test_an_embedding_weight_used_by_the_parent_trains(world_size):
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(20, WIDTH)
            self.blocks = blocks()

        def forward(self, x):
            return F.linear(through(self.blocks, self.embed(x)), self.embed.weight)

    law_1(world_size, training(Reader, batches=tokens()))


@every_world
def test_a_blocks_weight_used_by_the_parent_trains(world_size):
    class Reader(Tower):
        def forward(self, x):
            x = through(self.blocks, F.linear(x, self.first.weight, self.first.bias))
            x = x @ self.blocks[0].up.weight.t() @ self.blocks[1].up.weight
            return self.last(x) + torch.einsum("oi,bi->bo", self.last.weight, x)

    law_1(world_size, training(Reader))


@every_world
def test_a_blocks_weight_used_by_the_parent_before_the_block_trains(world_size):
    """Its gradient is complete only after backward has left the block."""

    class Reader(Tower):
        def forward(self, x):
            x = self.first(x) * self.blocks[0].down.bias
            x = x + x @ self.blocks[1].up.weight.t() @ self.blocks[1].up.weight
            return self.last(through(self.blocks, x) + self.last.weight.sum())

    law_1(world_size, training(partial(Reader, 3)))


@every_world
def test_a_weight_used_by_a_sibling_trains(world_size):
    """The sibling holds the module without owning it, so its parameters are not its own."""

    class Borrower(nn.Module):
        def __init__(self, lender):
            super().__init__()
            self.own = linear()
            self.lender = [lender]

        def forward(self, x):
            return torch.tanh(self.own(x)) @ self.lender[0].weight

    def build():
        lender = linear()
        return From(
            lambda self, x: through(self.blocks, self.lender(x)),
            lender=lender, blocks=nn.ModuleList(Borrower(lender) for _ in range(2)),
        )  # fmt: skip

    law_1(world_size, training(build))


@every_world
def test_a_weight_used_between_two_modules_of_its_unit_trains(world_size):
    """Where the unit is whole anyway, when another module uses its weight."""

    class Borrower(nn.Module):
        def __init__(self, lender):
            super().__init__()
            self.own = linear()
            self.lender = [lender]

        def forward(self, x):
            return torch.tanh(F.linear(self.own(x), self.lender[0].weight))

    def build():
        first = linear()
        return From(
            lambda self, x: self.last(through(self.blocks, self.first(x))),
            first=first, blocks=nn.ModuleList(Borrower(first) for _ in range(2)), last=linear(),
        )  # fmt: skip

    law_1(world_size, training(build))


@every_world
def test_a_module_after_a_head_by_weight_trains(world_size):
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(20, WIDTH)
            self.blocks = blocks()
            self.norm = nn.LayerNorm(20)

        def forward(self, x):
            return self.norm(F.linear(through(self.blocks, self.embed(x)), self.embed.weight))

    law_1(world_size, training(Reader, batches=tokens()))


@every_world
def test_a_module_whose_weights_are_used_without_calling_it_trains(world_size):
    class Uncalled(nn.Module):
        def __init__(self):
            super().__init__()
            self.pairs = nn.ModuleList(nn.Sequential(linear(), linear()) for _ in range(2))

        def forward(self, x):
            for first, second in self.pairs:
                x = F.linear(torch.tanh(F.linear(x, first.weight, first.bias)), second.weight)
            return x

    law_1(world_size, training(Uncalled))


@every_world
def test_multihead_attention_trains_though_its_projection_is_never_called(world_size):
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
            self.cross = nn.MultiheadAttention(WIDTH, 2, kdim=4, vdim=4, batch_first=True)

        def forward(self, x):
            x = x + self.attention(x, x, x, need_weights=False)[0]
            return x + self.cross(x, x[..., :4], x[..., :4])[0]

    def build():
        return From(
            lambda self, x: through(self.blocks, x.unflatten(1, (2, 4)).repeat(1, 1, 2)),
            blocks=nn.ModuleList(Attends() for _ in range(2)),
        )

    law_1(world_size, training(build, optimizer=sgd))


@every_world
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_train(world_size, kind):
    def build():
        return From(
            lambda self, x: self.out(self.cell(x.unflatten(1, (2, 4)))[0]),
            cell=kind(4, 5, num_layers=2, bidirectional=True, batch_first=True),
            out=nn.Linear(10, 3),
        )

    law_1(world_size, training(build))


@every_world
def test_a_transformer_encoder_trains_and_evaluates(world_size):
    def build():
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def script(process: Process) -> None:
        module, optimizer = process.ready(build, sgd)
        for index, batch in enumerate(rows()):
            batch = batch.unsqueeze(1).repeat(1, 3, 1)
            process.step(index, module, optimizer, squared(module), batch)
            module.eval()
            with torch.no_grad():
                process.note_mean(f"{index} eval", process.mean(squared(module), batch))
            module.train()

    # evaluation takes torch's fused path only where every weight is whole at once
    law_1(world_size, script, fine_units=False)


@every_world
def test_a_whole_transformer_trains(world_size):
    def build():
        inner = nn.Transformer(WIDTH, 2, 1, 1, 12, dropout=0.0, batch_first=True)
        return From(lambda self, x: self.inner(x, x[:, :2]), inner=inner)

    batches = [batch.unsqueeze(1).repeat(1, 3, 1) for batch in rows()]
    law_1(world_size, training(build, optimizer=sgd, batches=batches))


@every_world
def test_parametrized_weights_train(world_size):
    def build():
        tower = Tower()
        nn.utils.parametrizations.weight_norm(tower.blocks[0].up)
        nn.utils.parametrizations.weight_norm(tower.last)
        return tower

    law_1(world_size, training(build))


@every_world
def test_a_submodule_may_be_called_instead_of_the_root(world_size):
    def script(process: Process) -> None:
        module, optimizer = process.ready(Tower)
        for index, batch in enumerate(rows(3)):
            called = (module.blocks[1], module, module.first)[index]
            process.step(index, module, optimizer, squared(called), batch)
        process.note_weights(module)

    law_1(world_size, script)


@every_world
def test_a_method_that_is_not_forward_may_call_submodules(world_size):
    class Methods(Tower):
        def encode(self, x):
            return through(self.blocks, self.first(x))

    def script(process: Process) -> None:
        module, optimizer = process.ready(Methods)
        for index, batch in enumerate(rows(3)):
            process.step(
                index, module, optimizer,
                lambda x: F.linear(module.encode(x), module.last.weight).square().mean(), batch,
            )  # fmt: skip
        process.note_weights(module)

    law_1(world_size, script)


# outputs


@dataclass
class Output:
    hidden: Tensor
    total: Tensor
    extra: Any = None


class Holder:
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Slotted:
    __slots__ = ("hidden",)

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


OUTPUTS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tuple": (lambda x: (None, x, 3), lambda out: out[1]),
    "list": (lambda x: [x, x * 2], lambda out: out[0] + out[1]),
    "dict": (lambda x: {"x": x, "name": "n"}, lambda out: out["x"]),
    "nested": (lambda x: {"a": [(x, {"b": x + 1})]}, lambda out: out["a"][0][1]["b"]),
    "dataclass": (lambda x: Output(x, x.sum(1, True)), lambda out: out.hidden - out.total),
    "object": (Holder, lambda out: out.hidden),
    "object with slots": (Slotted, lambda out: out.hidden),
    "namespace": (lambda x: SimpleNamespace(x=[x]), lambda out: out.x[0]),
    "user dict": (lambda x: UserDict(x=x), lambda out: out["x"]),
}


@odd_worlds
@pytest.mark.parametrize("kind", OUTPUTS)
def test_modules_may_give_anything_that_holds_tensors(world_size, kind):
    pack, unpack = OUTPUTS[kind]

    class Packing(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)

        def forward(self, x):
            return pack(x + self.down(torch.tanh(self.up(x))))

    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Packing() for _ in range(2))
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x):
            for block in self.blocks:
                x = unpack(block(x))
            return pack(x * self.weight)

    law_1(world_size, training(Root, lambda m: lambda x: unpack(m(x)).square().mean()))


@every_world
def test_outputs_stored_on_the_module_are_trained_through(world_size):
    """A model that keeps its loss as an attribute and returns nothing."""

    class Keeping(Tower):
        def forward(self, x):
            self.kept = [super().forward(x)]

    def loss(module):
        def of(x):
            assert module(x) is None
            return module.kept.pop().square().mean()

        return of

    law_1(world_size, training(Keeping, loss))


@every_world
def test_outputs_may_be_changed_in_place_and_viewed(world_size):
    class InPlace(Tower):
        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = block(x).view(-1, 2, WIDTH // 2)
                x += 1
                x = x.view(-1, WIDTH)
                x[:, :2] *= 0.5
                x.relu_()
            x = self.last(x)
            x.sub_(1)
            return x.t()

    law_1(world_size, training(InPlace))


@every_world
def test_outputs_that_are_hidden_are_an_error_or_are_trained_through(world_size):
    """Nobody can see into a generator; what must not happen is a wrong gradient."""

    class Hiding(Residual):
        def forward(self, x):
            return (y for y in [super(Hiding, self).forward(x)])

    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Hiding() for _ in range(2))

        def forward(self, x):
            for block in self.blocks:
                x = next(block(x))
            return x

    try:
        law_1(world_size, training(Root))
    except onefold.StateError as error:
        assert "blocks." in str(error)
        assert "hint:" in str(error)


@every_world
@pytest.mark.parametrize("part", [slice(None), slice(1, None)], ids=["whole", "slice"])
def test_a_weight_or_a_slice_of_it_may_be_the_output(world_size, part):
    """As learned position embeddings do."""

    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, WIDTH))

        def forward(self):
            return self.weight if part == slice(None) else self.weight[part]

    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = linear()
            self.positions = nn.ModuleList(Positions() for _ in range(2))
            self.last = linear()

        def forward(self, x):
            x = torch.tanh(self.first(x))
            for positions in self.positions:
                where = positions()
                x = torch.tanh(x + x @ where.t() @ where)
            return self.last(x)

    law_1(world_size, training(Root))


@every_world
def test_the_input_or_a_view_of_it_may_be_the_output(world_size):
    class Passing(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, WIDTH))

        def forward(self, x):
            return x, x[:, :3], F.linear(x, self.weight)

    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.passes = nn.ModuleList(Passing() for _ in range(2))

        def forward(self, x):
            for layer in self.passes:
                x, start, projected = layer(x)
                x = x + (start * projected).sum(1, keepdim=True)
            return x

    law_1(world_size, training(Root))


# weights that change themselves, recompute, evaluation


@every_world
def test_a_module_may_change_its_own_weight_in_forward(world_size):
    class Normalising(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(7, WIDTH))

        def forward(self, x):
            with torch.no_grad():
                self.weight.copy_(F.normalize(self.weight, dim=1))
            return F.linear(x, self.weight) @ self.weight

    def build():
        return From(
            lambda self, x: through(self.blocks, x),
            blocks=nn.ModuleList(Normalising() for _ in range(2)),
        )

    law_1(world_size, training(build))


@every_world
def test_a_module_may_change_its_own_weight_through_data_in_forward(world_size):
    class Clamping(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(7, WIDTH))

        def forward(self, x):
            self.weight.data.clamp_(-0.5, 0.5)
            return F.linear(x, self.weight) @ self.weight

    def build():
        return From(
            lambda self, x: through(self.blocks, x),
            blocks=nn.ModuleList(Clamping() for _ in range(2)),
        )

    law_1(world_size, training(build))


@every_world
def test_a_frozen_codebook_may_follow_its_own_rule(world_size):
    """A parameter that is updated by the module itself alike on all ranks, not by autograd."""

    class Codebook(nn.Module):
        def __init__(self):
            super().__init__()
            self.codes = nn.Parameter(torch.randn(5, WIDTH), requires_grad=False)
            self.inner = linear()

        def forward(self, x):
            out = self.inner(x) + self.codes.mean(0)
            if self.training:
                self.codes.mul_(0.9)
            return out

    def build():
        return From(
            lambda self, x: through(self.blocks, x),
            blocks=nn.ModuleList(Codebook() for _ in range(2)),
        )

    law_1(world_size, training(build))


@every_world
@pytest.mark.parametrize("reentrant", [False, True])
def test_recompute_of_each_block_trains(world_size, reentrant):
    class Recomputing(Tower):
        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return self.last(x)

    law_1(world_size, training(partial(Recomputing, 3)))


@every_world
@pytest.mark.parametrize("reentrant", [False, True])
def test_recompute_of_several_blocks_at_once_trains(world_size, reentrant):
    class Recomputing(Tower):
        def forward(self, x):
            x = self.first(x)
            x = checkpoint_sequential(self.blocks, 2, x, use_reentrant=reentrant)
            return self.last(x)

    def build():
        tower = Recomputing(4)
        tower.blocks = nn.Sequential(*tower.blocks)
        return tower

    law_1(world_size, training(build))


@pytest.mark.parametrize("world_size", [1, 3])
def test_selective_recompute_of_several_units_at_once_trains(world_size):
    """Recompute runs the operations that it counted, and gathers more than forward did."""
    saved = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])

    class Recomputing(Tower):
        def forward(self, x):
            x = checkpoint(self.first, x, use_reentrant=False, context_fn=saved)
            x = checkpoint(self.blocks, x, use_reentrant=False, context_fn=saved)
            return self.last(x)

    def build():
        tower = Recomputing(3)
        tower.blocks = nn.Sequential(*tower.blocks)
        return tower

    law_1(world_size, training(build))


@every_world
@pytest.mark.parametrize("reentrant", [False, True])
def test_recompute_inside_a_block_trains(world_size, reentrant):
    class Inner(Residual):
        def forward(self, x):
            hidden = checkpoint(self.up, x, use_reentrant=reentrant)
            return x + checkpoint(
                lambda h: self.down(torch.tanh(h)), hidden, use_reentrant=reentrant
            )

    def build():
        tower = Tower()
        tower.blocks = nn.ModuleList(Inner() for _ in range(2))
        return tower

    law_1(world_size, training(build))


@every_world
@pytest.mark.parametrize("reentrant", [False, True])
def test_recompute_of_the_whole_module_trains(world_size, reentrant):
    def loss(module):
        def of(x):
            return checkpoint(module, x.requires_grad_(), use_reentrant=reentrant).square().mean()

        return of

    batches = [batch.clone() for batch in rows()]
    law_1(world_size, training(Tower, loss, batches=batches))


@every_world
def test_recompute_within_recompute_trains(world_size):
    class Nested(Tower):
        def forward(self, x):
            def inner(x):
                x = checkpoint(self.blocks[0], x, use_reentrant=False)
                return checkpoint(self.blocks[1], x, use_reentrant=False)

            return self.last(checkpoint(inner, self.first(x), use_reentrant=False))

    law_1(world_size, training(Nested))


@every_world
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_evaluation_between_steps_changes_nothing(world_size, guard):
    def script(process: Process) -> None:
        module, optimizer = process.ready(Tower)
        for index, batch in enumerate(rows(3)):
            module.eval()
            with guard():
                process.note_mean(f"{index} eval", process.mean(squared(module), batch * 2))
            module.train()
            process.step(index, module, optimizer, squared(module), batch)
        with guard():
            process.note_mean("last eval", process.mean(squared(module), rows(3)[0]))
        process.note_weights(module)

    law_1(world_size, script)


@every_world
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_evaluation_between_forward_and_backward_changes_nothing(world_size, guard):
    def script(process: Process) -> None:
        module, optimizer = process.ready(Tower)
        for index, batch in enumerate(rows(2)):
            loss = process.mean(squared(module), batch)
            with guard():
                process.note_mean(f"{index} eval", process.mean(squared(module), batch * 2))
            loss.backward()
            with guard():
                process.note_mean(f"{index} eval after", process.mean(squared(module), batch * 3))
            process.note_grads(f"{index}", module)
            optimizer.step()
            optimizer.zero_grad()
        process.note_weights(module)

    law_1(world_size, script)


# several forwards, losses and backwards


@every_world
def test_two_forwards_before_one_backward_train(world_size):
    def loss(module):
        return lambda x: module(x).square().mean() + (module(x * 2) - 1).square().mean()

    law_1(world_size, training(Tower, loss))


@every_world
def test_a_module_fed_with_its_own_output_trains(world_size):
    def loss(module):
        return lambda x: module(module(module(x))).square().mean()

    def build():
        return nn.Sequential(Residual(), Residual())

    law_1(world_size, training(build, loss))


@every_world
def test_two_losses_of_one_forward_with_two_backwards_train(world_size):
    def script(process: Process) -> None:
        module, optimizer = process.ready(Tower)
        for index, batch in enumerate(rows()):
            part = torch.cat(process.parts(batch))
            out = module(part)
            first, second = out.square().mean(), (out[:, 0] - 1).square().mean()
            first.backward(retain_graph=True)
            process.note_grads(f"{index} first", module)
            second.backward()
            process.note_grads(f"{index} both", module)
            optimizer.step()
            optimizer.zero_grad()
        process.note_weights(module)

    law_1_of_sums(world_size, script)


@every_world
def test_a_second_backward_through_a_retained_graph_doubles_gradients(world_size):
    def script(process: Process) -> None:
        module, optimizer = process.ready(Tower)
        for index, batch in enumerate(rows()):
            loss = process.mean(squared(module), batch)
            loss.backward(retain_graph=True)
            loss.backward()
            process.note_grads(f"{index}", module)
            optimizer.step()
            optimizer.zero_grad()
        process.note_weights(module)

    law_1_of_sums(world_size, script)


@every_world
def test_backwards_of_two_forwards_in_any_order_train(world_size):
    def script(process: Process) -> None:
        module, optimizer = process.ready(Tower)
        for index, batch in enumerate(rows(2)):
            one = process.mean(squared(module), batch)
            two = process.mean(squared(module), batch * 2)
            for loss in (one, two) if index else (two, one):
                loss.backward()
            process.note_grads(f"{index}", module)
            optimizer.step()
            optimizer.zero_grad()
        process.note_weights(module)

    law_1_of_sums(world_size, script)


@every_world
def test_a_gradient_penalty_through_a_second_derivative_trains(world_size):
    def loss(module):
        def of(x):
            x = x.clone().requires_grad_()
            out = module(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            return out.square().mean() + (slope.norm(dim=1) - 1).square().mean()

        return of

    law_1(world_size, training(Tower, loss))


@every_world
def test_gradients_of_inputs_alone_leave_parameters_without_gradient(world_size):
    def script(process: Process) -> None:
        module, optimizer = process.ready(Tower)
        for index, batch in enumerate(rows()):
            part = torch.cat(process.parts(batch)).requires_grad_()
            (slope,) = torch.autograd.grad(module(part).square().sum(), part)
            process.note_mean(f"{index} slope", slope.square().mean())
            process.note_grads(f"{index} none", module)
            process.step(index, module, optimizer, squared(module), batch)
        process.note_weights(module)

    law_1(world_size, script)


@every_world
def test_backward_of_part_of_the_parameters_leaves_the_others_alone(world_size):
    """Only the last module is in the graph: the others were run without gradients."""

    def loss(module):
        def of(x):
            with torch.no_grad():
                hidden = through(module.blocks, module.first(x))
            return module.last(hidden).square().mean()

        return of

    law_1(world_size, training(Tower, loss))


@every_world
def test_no_grad_inside_forward_is_respected(world_size):
    class PartlyFrozen(Tower):
        def forward(self, x):
            with torch.no_grad():
                x = self.blocks[0](self.first(x))
            return self.last(self.blocks[1](x))

    law_1(world_size, training(PartlyFrozen))


# exceptions


class Oops(Exception):
    pass


class Failing(Tower):
    """Raises in the middle of forward or backward when told to."""

    fails = ""

    def forward(self, x):
        x = self.blocks[0](self.first(x))
        if self.fails == "forward":
            raise Oops
        if self.fails == "backward":
            x.register_hook(_raise)
        return self.last(self.blocks[1](x))


def _raise(_: Tensor) -> None:
    raise Oops


@every_world
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("first", [0, 1])
def test_steps_after_an_exception_are_those_of_a_run_without_it(world_size, where, first):
    def script(process: Process) -> None:
        module, optimizer = process.ready(Failing)
        for index, batch in enumerate(rows(4)):
            if index == first and not process.is_plain:
                module.fails = where
                with pytest.raises(Oops):
                    process.mean(squared(module), batch * 3).backward()
                module.fails = ""
                optimizer.zero_grad()
            process.step(index, module, optimizer, squared(module), batch)
        process.note_weights(module)

    law_1(world_size, script)


@every_world
@pytest.mark.parametrize("called", ["root", "block"])
def test_edits_after_a_failed_backward_are_those_of_the_parameters_before_it(world_size, called):
    def script(process: Process) -> None:
        module, optimizer = process.ready(Failing)
        parameters = list(module.parameters())
        for index, batch in enumerate(rows(2)):
            module.fails = "backward"
            with pytest.raises(Oops):
                process.mean(squared(module), batch * 3).backward()
            module.fails = ""
            optimizer.zero_grad()
            assert all(a is b for a, b in zip(parameters, module.parameters(), strict=True))
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.mul_(0.9)
            next_one = module if called == "root" else module.blocks[0]
            process.step(f"{index} first", module, optimizer, squared(next_one), batch)
            process.step(f"{index} then", module, optimizer, squared(module), batch)
        process.note_weights(module)

    law_1(world_size, script)


class Listed(nn.Module):
    """Its parameters are those of a list, which is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.gains = nn.ParameterList(nn.Parameter(torch.ones(WIDTH) + i) for i in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.gains[0]) * self.gains[1]


@every_world
def test_a_part_that_no_hook_sees_trains_after_a_failed_backward(world_size):
    def script(process: Process) -> None:
        module, optimizer = process.ready(lambda: nn.Sequential(Listed(), nn.Linear(WIDTH, WIDTH)))
        for index, batch in enumerate(rows(2)):
            x = batch.clone().requires_grad_()
            x.register_hook(_raise)
            with pytest.raises(Oops):
                process.mean(squared(module), x).backward()
            module.zero_grad()
            process.step(f"{index} part", module, optimizer, squared(module[0]), batch)
            process.step(f"{index} root", module, optimizer, squared(module), batch)
        process.note_weights(module)

    law_1(world_size, script)


@every_world
def test_an_exception_in_a_submodule_called_directly_leaves_it_usable(world_size):
    class Fragile(Residual):
        fails = False

        def forward(self, x):
            hidden = self.up(x)
            if self.fails:
                raise Oops
            return x + self.down(hidden)

    def build():
        tower = Tower()
        tower.blocks = nn.ModuleList(Fragile() for _ in range(2))
        return tower

    def script(process: Process) -> None:
        module, optimizer = process.ready(build)
        for index, batch in enumerate(rows(3)):
            module.blocks[1].fails = True
            for called in (module, module.blocks[1]):
                with pytest.raises(Oops):
                    called(batch)
            with pytest.raises(Oops), torch.no_grad():
                module(batch)
            module.blocks[1].fails = False
            process.step(index, module, optimizer, squared(module), batch)
        process.note_weights(module)

    law_1(world_size, script)


@every_world
def test_an_exception_in_recompute_leaves_the_next_step_right(world_size):
    class Recomputing(Tower):
        countdown = -1

        def forward(self, x):
            def last_blocks(x):
                self.countdown -= 1
                if self.countdown == 0:
                    raise Oops
                return self.blocks[1](x)

            x = self.blocks[0](self.first(x))
            return self.last(checkpoint(last_blocks, x, use_reentrant=False))

    def script(process: Process) -> None:
        module, optimizer = process.ready(Recomputing)
        for index, batch in enumerate(rows(3)):
            if index == 1 and not process.is_plain:
                module.countdown = 2
                loss = process.mean(squared(module), batch)
                with pytest.raises(Oops):
                    loss.backward()
                optimizer.zero_grad()
            module.countdown = -1
            process.step(index, module, optimizer, squared(module), batch)
        process.note_weights(module)

    law_1(world_size, script)


@every_world
def test_a_forward_whose_loss_is_dropped_leaves_the_next_step_right(world_size):
    def script(process: Process) -> None:
        module, optimizer = process.ready(Tower)
        for index, batch in enumerate(rows(3)):
            if not process.is_plain:
                process.mean(squared(module), batch * 2)
            process.step(index, module, optimizer, squared(module), batch)
            if not process.is_plain:
                module.blocks[0](batch)
        process.note_weights(module)

    law_1(world_size, script)


# what happens to gradients and weights between backward and forward


@every_world
def test_gradient_clipping_by_norm_trains(world_size):
    def script(process: Process) -> None:
        module, optimizer = process.ready(Tower)
        for index, batch in enumerate(rows()):
            process.mean(squared(module), batch).backward()
            norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 0.05)
            process.note(f"{index} norm", norm)
            process.note_grads(f"{index}", module)
            optimizer.step()
            optimizer.zero_grad()
        process.note_weights(module)

    law_1(world_size, script, stages=(1, 2, 3))
    law_1(world_size, script, stages=(0,), fine_units=False)


@every_world
def test_gradient_clipping_by_value_trains(world_size):
    def script(process: Process) -> None:
        module, optimizer = process.ready(Tower)
        for index, batch in enumerate(rows()):
            process.mean(squared(module), batch).backward()
            torch.nn.utils.clip_grad_value_(module.parameters(), 0.01)
            process.note_grads(f"{index}", module)
            optimizer.step()
            optimizer.zero_grad()
        process.note_weights(module)

    law_1(world_size, script)


@every_world
def test_gradients_changed_by_hand_are_stepped(world_size):
    def script(process: Process) -> None:
        module, optimizer = process.ready(Tower)
        for index, batch in enumerate(rows()):
            process.mean(squared(module), batch).backward()
            with torch.no_grad():
                for parameter in module.blocks.parameters():
                    parameter.grad.mul_(0.5)
                module.last.bias.grad = module.last.bias.grad * 2
                module.last.weight.grad.data = module.last.weight.grad.data.sign()
                module.first.weight.grad.data = torch.full_like(module.first.weight, 0.1)
                module.first.bias.grad = None
            process.note_grads(f"{index}", module)
            optimizer.step()
            optimizer.zero_grad(set_to_none=index == 0)
        process.note_weights(module)

    law_1(world_size, script)


@every_world
def test_a_sum_goes_on_from_gradients_whose_data_was_replaced(world_size):
    def script(process: Process) -> None:
        module, optimizer = process.ready(Tower)
        for index, batch in enumerate(rows(4)):
            process.mean(squared(module), batch).backward()
            if index % 2 == 0:
                for parameter in module.parameters():
                    parameter.grad.data = parameter.grad.data * 0.5
                continue
            process.note_grads(f"{index}", module)
            optimizer.step()
            optimizer.zero_grad()
        process.note_weights(module)

    law_1(world_size, script)


@every_world
def test_gradients_cleared_by_the_module_or_to_zero_start_afresh(world_size):
    def script(process: Process) -> None:
        module, optimizer = process.ready(Tower)
        for index, batch in enumerate(rows(4)):
            process.mean(squared(module), batch).backward()
            process.note_grads(f"{index}", module)
            optimizer.step()
            if index == 0:
                module.zero_grad()
            elif index == 1:
                optimizer.zero_grad(set_to_none=False)
            elif index == 2:
                for parameter in module.parameters():
                    parameter.grad = None
        process.note_weights(module)

    law_1(world_size, script)


@every_world
def test_gradients_that_are_never_cleared_add_up(world_size):
    def script(process: Process) -> None:
        module, optimizer = process.ready(Tower)
        for index, batch in enumerate(rows(3)):
            process.mean(squared(module), batch).backward()
            process.note_grads(f"{index}", module)
            optimizer.step()
        process.note_weights(module)

    law_1_of_sums(world_size, script)


@every_world
def test_weights_edited_between_steps_are_trained_on(world_size):
    def script(process: Process) -> None:
        module, optimizer = process.ready(Tower)
        for index, batch in enumerate(rows(3)):
            process.step(index, module, optimizer, squared(module), batch)
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.mul_(0.9)
                module.first.weight.zero_()
                module.last.bias.fill_(0.25)
        process.note_weights(module)

    law_1(world_size, script)


@every_world
def test_a_penalty_on_all_parameters_is_part_of_the_gradient(world_size):
    def loss(module):
        def of(x):
            penalty = sum(p.pow(2).sum() for p in module.parameters())
            return module(x).square().mean() + 0.01 * penalty

        return of

    law_1(world_size, training(Tower, loss))


@every_world
def test_a_penalty_after_the_forward_is_part_of_the_gradient(world_size):
    def loss(module):
        def of(x):
            out = module(x).square().mean()
            norms = torch.stack([p.norm() for p in module.blocks.parameters()])
            return out + 0.01 * norms.sum() + module.last.weight[0].abs().sum()

        return of

    law_1(world_size, training(Tower, loss))


@every_world
def test_a_penalty_alone_gives_gradients_without_a_forward(world_size):
    def script(process: Process) -> None:
        module, optimizer = process.ready(Tower)
        for index in range(3):
            penalty = sum((p * p).sum() for p in module.blocks.parameters())
            penalty.backward()
            process.note_grads(f"{index}", module)
            optimizer.step()
            optimizer.zero_grad()
        process.note_weights(module)

    law_1(world_size, script)


# several modules in one process


@every_world
def test_two_models_that_train_each_other_in_turn(world_size):
    """A generator and a discriminator, each with its own loss and optimizer."""

    def script(process: Process) -> None:
        maker, maker_steps = process.ready(Tower)
        judge, judge_steps = process.ready(lambda: nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)))
        for index, batch in enumerate(rows()):

            def judged(x):
                made = maker(x).detach()
                return judge(made).square().mean() - judge(x[:, :3]).tanh().mean()

            process.step(f"{index} judge", judge, judge_steps, judged, batch)
            process.step(
                f"{index} maker", maker, maker_steps, lambda x: -judge(maker(x)).mean(), batch
            )
            judge_steps.zero_grad()
        process.note_weights(maker, "maker")
        process.note_weights(judge, "judge")

    law_1(world_size, script)


@every_world
def test_two_models_with_one_loss_and_one_optimizer(world_size):
    def script(process: Process) -> None:
        one, _ = process.ready(Tower, sgd)
        two, _ = process.ready(lambda: nn.Linear(3, 3), sgd)
        both = torch.optim.AdamW([*one.parameters(), *two.parameters()], lr=1e-2, eps=1e-4)
        for index, batch in enumerate(rows()):
            loss = process.mean(lambda x: (two(one(x)) - 1).square().mean(), batch)
            loss.backward()
            process.note_grads(f"{index} one", one)
            process.note_grads(f"{index} two", two)
            both.step()
            both.zero_grad()
        process.note_weights(one, "one")
        process.note_weights(two, "two")

    law_1(world_size, script)


@every_world
def test_a_teacher_and_a_student_train_with_one_loss(world_size):
    def script(process: Process) -> None:
        teacher, _ = process.ready(lambda: Tower(3).eval().requires_grad_(False))
        student, optimizer = process.ready(partial(Tower, 1))
        for index, batch in enumerate(rows()):

            def distance(x):
                with torch.no_grad():
                    wanted = teacher(x)
                return (student(x) - wanted).square().mean()

            process.step(index, student, optimizer, distance, batch)
        process.note_weights(student)

    law_1(world_size, script)


# kinds of roots


@every_world
def test_nested_lists_of_modules_train(world_size):
    def build():
        return From(
            lambda self, x: through([block for row in self.rows for block in row], x),
            rows=nn.ModuleList(nn.ModuleList(Residual() for _ in range(2)) for _ in range(2)),
        )

    law_1(world_size, training(build))


@every_world
def test_lists_and_dicts_of_parameters_train(world_size):
    def build():
        return From(
            lambda self, x: x * self.list[0] + self.list[1] + x @ self.table["a"],
            list=nn.ParameterList([torch.ones(WIDTH), torch.zeros(1)]),
            table=nn.ParameterDict({"a": torch.randn(WIDTH, WIDTH), "unused": torch.ones(2)}),
        )

    law_1(world_size, training(build))


@every_world
def test_a_model_whose_only_parameters_are_on_the_root_trains(world_size):
    class Rooted(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, WIDTH))
            self.bias = nn.Parameter(torch.zeros(5))
            self.act = nn.Tanh()

        def forward(self, x):
            return self.act(F.linear(x, self.weight, self.bias))

    law_1(world_size, training(Rooted))


@every_world
@pytest.mark.parametrize(
    "build",
    [linear, lambda: nn.Sequential(linear(), nn.Tanh(), linear(), nn.LayerNorm(WIDTH), linear())],
    ids=["one layer", "sequential"],
)
def test_a_torch_module_may_be_the_root(world_size, build):
    law_1(world_size, training(build))


@every_world
def test_experts_that_no_row_reaches_have_the_gradient_of_one_process(world_size):
    class Experts(nn.Module):
        """Every expert runs on every rank; a rank may have no rows for it."""

        def __init__(self):
            super().__init__()
            self.gate = linear(4)
            self.experts = nn.ModuleList(linear() for _ in range(4))

        def forward(self, x):
            weights = self.gate(x).softmax(1)
            top = weights.argmax(1)
            out = torch.zeros_like(x)
            for index, expert in enumerate(self.experts):
                mine = (top == index).nonzero().squeeze(1)
                out = out.index_add(0, mine, expert(x[mine]) * weights[mine, index, None])
            return x + out

    def build():
        return nn.Sequential(Experts(), Experts())

    law_1(world_size, training(build))


class SkippingExperts(nn.Module):
    """Experts without rows are not called, as most plain mixtures do: ranks call different ones."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = linear(4)
        self.experts = nn.ModuleList(Residual() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(1)
        top = weights.argmax(1)
        out = torch.zeros_like(x)
        for index in top.unique().tolist():
            mine = (top == index).nonzero().squeeze(1)
            out = out.index_add(0, mine, self.experts[index](x[mine]) * weights[mine, index, None])
        return x + out


@every_world
@pytest.mark.parametrize("num_blocks", [1, 2, 5])
def test_experts_that_some_ranks_skip_train_as_in_one_process(world_size, num_blocks):
    """A mixture is one unit, so what each rank calls inside it is its own affair."""

    def build():
        return From(
            lambda self, x: self.last(through(self.blocks, self.first(x))),
            first=linear(), last=linear(3),
            blocks=nn.ModuleList(SkippingExperts() for _ in range(num_blocks)),
        )  # fmt: skip

    law_1(world_size, training(build), fine_units=False)


@every_world
def test_keyword_inputs_and_inputs_that_need_gradients_train(world_size):
    def loss(module):
        return lambda x: module(x=x.clone().requires_grad_()).square().mean()

    law_1(world_size, training(Tower, loss))


@every_world
def test_autocast_around_forward_trains_alike_at_every_stage(world_size):
    def loss(module):
        def of(x):
            with torch.autocast("cpu", torch.bfloat16):
                return module(x).float().square().mean()

        return of

    law_1(world_size, training(Tower, loss), relative=1e-3)


def test_dropout_is_that_of_one_process_under_the_same_seed():
    def script(process: Process) -> None:
        module, optimizer = process.ready(
            lambda: nn.Sequential(linear(), nn.Dropout(0.5), Residual(), nn.Dropout(0.5), linear())
        )
        torch.manual_seed(3)
        for index, batch in enumerate(rows()):
            process.step(index, module, optimizer, squared(module), batch)
        process.note_weights(module)

    law_1(1, script)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_without_a_process_group_a_module_trains_as_before(stage):
    script = training(Tower)
    process = Process(0, 1, stage)
    script(process)
    for name, value in run_plain(script).items():
        assert value is not None
        torch.testing.assert_close(process.seen[name], value, rtol=1e-5, atol=1e-7, msg=name)


@every_world
def test_accumulated_micro_batches_train_any_module(world_size):
    """Tied, frozen, scalar and unused parameters, over two micro-batches of which one uses less."""

    class Mixed(Tower):
        skips = False

        def __init__(self):
            super().__init__()
            self.blocks[1].up.weight = self.blocks[0].up.weight
            self.first.weight.requires_grad_(False)
            self.gain = nn.Parameter(torch.tensor(1.5))
            self.unused = nn.Parameter(torch.ones(3))

        def forward(self, x):
            x = self.blocks[0](self.first(x))
            return self.last(x if self.skips else self.blocks[1](x)) * self.gain

    def script(process: Process) -> None:
        module, optimizer = process.ready(Mixed)
        for index, batch in enumerate(rows(2)):
            module.skips = index == 0
            if process.is_plain:
                process.mean(squared(module), batch).backward()
            else:
                with onefold.accumulate(module):
                    process.mean(squared(module), batch).backward()
            module.skips = index == 1
            process.step(index, module, optimizer, squared(module), batch * 2)
        process.note_weights(module)

    law_1(world_size, script, stages=(0, 1), fine_units=False)
    law_1(world_size, script, stages=(2, 3))


def test_ranks_that_take_other_units_get_an_error_that_names_the_unit():
    """Where collectives must be in one order and are not, law 5 holds: no hang, no wrong result."""

    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.branches = nn.ModuleList(Residual() for _ in range(2))

        def forward(self, x, rank):
            return self.branches[rank](x)

    def body(rank: int) -> None:
        module = Branching()
        onefold.shard(module, stage=3)
        module(torch.ones(2, WIDTH), rank).sum().backward()

    with pytest.raises((onefold.OnefoldError, RuntimeError)):
        run_ranks(2, body)


def test_ranks_that_evaluate_other_units_get_an_error():
    """Without a backward there is no reduction to notice it by."""

    def body(rank: int) -> Tensor:
        module = seeded(lambda: From(
            lambda self, x, index: self.branches[index](x),
            branches=nn.ModuleList(Residual() for _ in range(2)),
        ))  # fmt: skip
        onefold.shard(module, stage=3)
        with torch.no_grad():
            return module(torch.ones(2, WIDTH), rank)

    with pytest.raises(onefold.OnefoldError):
        run_ranks(2, body)


class Dropping(Tower):
    """Leaves out blocks, as the first row's mark says: bit k for block k (LayerDrop)."""

    def __init__(self) -> None:
        super().__init__(3)

    def forward(self, x: Tensor, mark: Tensor) -> Tensor:
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            x = x if int(mark[0]) & 1 << index else block(x)
        return self.last(x)


def dropped() -> list[tuple[Tensor, Tensor]]:
    """Nothing is skipped; one by some ranks; all by all ranks but the last; one by every rank."""
    are_last = torch.arange(ROWS) >= ROWS - ROWS // 4
    marks = [0 * are_last, 2 * are_last, 7 * ~are_last, 4 + 0 * are_last, 1 + are_last]
    return list(zip(rows(5), marks, strict=True))


@pytest.mark.parametrize(
    ("stage", "options"),
    [(0, {}), (1, {}), (2, {"offload": "optimizer"}), (1, {"wire": onefold.Wire("int8")})],
)
def test_layers_that_some_ranks_skip_train_as_in_one_process_at_stages_0_to_2(stage, options):
    def script(process: Process) -> None:
        module, optimizer = process.ready(Dropping, **options)
        for index, (batch, mark) in enumerate(dropped()):
            waits = nullcontext() if process.is_plain else onefold.accumulate(module)
            if index % 2:
                with waits:
                    process.mean(marked(module), (batch, mark.flip(0))).backward()
            else:
                with torch.no_grad():
                    process.mean(marked(module), (batch, mark.flip(0)))
            process.step(index, module, optimizer, marked(module), (batch, mark))
        process.note_weights(module)

    relative = 2e-2 if "wire" in options else 1e-6
    law_1(3, script, relative=relative, fine_units=False, by_part=True, stages=(stage,))


@every_world
def test_root_layers_that_some_ranks_skip_are_trained_or_are_an_error(world_size):
    """The layers around blocks share a unit; gathering it must not depend on them."""

    class Skipping(Tower):
        def __init__(self):
            super().__init__()
            self.middle = linear()

        def forward(self, x, mark):
            x = self.blocks[0](self.first(x))
            if mark[0]:
                x = torch.tanh(self.middle(x))
            return self.last(self.blocks[1](x))

    script = training(Skipping, marked, batches=by_half())
    law_1(world_size, script, fine_units=False, by_part=True, stages=(0, 1))
    try:
        law_1(world_size, script, fine_units=False, by_part=True, stages=(3,))
    except onefold.OnefoldError as error:
        assert "hint:" in str(error)


@every_world
def test_a_graph_that_one_rank_keeps_does_not_change_the_order_of_collectives(world_size):
    """As when rank 0 alone keeps a validation loss for its log."""

    def script(process: Process) -> None:
        module, optimizer = process.ready(Tower)
        kept = []
        for index, batch in enumerate(rows(3)):
            validation = process.mean(squared(module), batch * 2)
            if process.rank == 0:
                kept.append(validation)
            process.step(index, module, optimizer, squared(module), batch)
        process.note_weights(module)

    law_1(world_size, script)


# more of the ordinary loop


@every_world
def test_gradients_accumulated_and_then_cleared_are_gone(world_size):
    def script(process: Process) -> None:
        module, optimizer = process.ready(Tower)
        for index, batch in enumerate(rows(3)):
            if not process.is_plain:
                with onefold.accumulate(module):
                    process.mean(squared(module), batch * 3).backward()
                module.zero_grad() if index else optimizer.zero_grad()
            process.step(index, module, optimizer, squared(module), batch)
        process.note_weights(module)

    law_1(world_size, script)


@every_world
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_without_the_last_micro_batch_is_right_or_an_error(world_size, stage):
    """A loop whose number of batches does not divide by the micro-batches ends like this."""

    def script(process: Process) -> None:
        module, optimizer = process.ready(Tower)
        process.step(0, module, optimizer, squared(module), rows()[0])
        if process.is_plain:
            process.mean(squared(module), rows()[1]).backward()
        else:
            with onefold.accumulate(module):
                process.mean(squared(module), rows()[1]).backward()
        optimizer.step()
        process.note_weights(module)

    try:
        law_1(world_size, script, stages=(stage,), fine_units=False)
    except onefold.StateError as error:
        assert "hint:" in str(error)


@every_world
def test_between_micro_batches_a_module_may_be_looked_at(world_size):
    def script(process: Process) -> None:
        module, optimizer = process.ready(Tower)
        for index, batch in enumerate(rows(2)):
            if process.is_plain:
                process.mean(squared(module), batch * 2).backward()
            else:
                with onefold.accumulate(module):
                    process.mean(squared(module), batch * 2).backward()
                    with torch.no_grad():
                        module(batch)
                with onefold.unsharded(module):
                    assert module.first.weight.shape == (WIDTH, WIDTH)
                module.state_dict()
                with torch.no_grad():
                    module.blocks[0](batch)
                onefold.report(module)
            process.step(index, module, optimizer, squared(module), batch)
        process.note_weights(module)

    law_1(world_size, script, stages=(0, 1), fine_units=False)
    law_1(world_size, script, stages=(2, 3))


@every_world
@pytest.mark.parametrize("change", ["step", "load", "copy"])
def test_weights_changed_between_forward_and_backward_are_an_error_as_in_plain_torch(
    world_size, change
):
    """Gradients of the old forward at the new weights would be of no function at all."""

    def script(process: Process) -> None:
        module, optimizer = process.ready(Tower)
        other = {name: p.clone() for name, p in seeded(Tower, seed=5).state_dict().items()}
        process.step(0, module, optimizer, squared(module), rows()[0])
        early = process.mean(squared(module), rows()[1])
        if change == "step":
            process.mean(squared(module), rows()[0]).backward()
            optimizer.step()
        elif change == "load":
            module.load_state_dict(other)
        else:
            with torch.no_grad():
                module.last.weight.mul_(2)
        with pytest.raises(RuntimeError):
            early.backward()
        process.note("refused", torch.ones(1))

    law_1(world_size, script)


@every_world
def test_hooks_on_modules_see_every_forward_and_backward(world_size):
    def script(process: Process) -> None:
        seen: list[str] = []

        def build():
            tower = Tower()
            block = tower.blocks[0]
            block.register_forward_pre_hook(lambda m, args: (args[0] * 1.5,))
            block.register_forward_hook(lambda m, args, out: out * 0.5)
            block.register_full_backward_hook(lambda m, gi, go: seen.append("before"))
            return tower

        module, optimizer = process.ready(build)
        block = module.blocks[1]
        block.register_forward_pre_hook(lambda m, args: (args[0] + m.up.weight[0],))
        block.register_forward_hook(lambda m, args, out: out * m.down.bias.sum())
        block.register_full_backward_pre_hook(lambda m, go: (go[0] * 2,))
        block.register_full_backward_hook(lambda m, gi, go: (gi[0] * 3,))
        for index, batch in enumerate(rows(2)):
            process.step(index, module, optimizer, squared(module), batch)
        process.note_weights(module)
        assert seen == ["before"] * 2

    law_1(world_size, script)


@every_world
def test_a_target_network_follows_another_module(world_size):
    def script(process: Process) -> None:
        online, optimizer = process.ready(Tower)
        target, _ = process.ready(lambda: Tower().requires_grad_(False))
        for index, batch in enumerate(rows(2)):

            def distance(x):
                return (online(x) - target(x) - 1).square().mean()

            process.step(index, online, optimizer, distance, batch)
            with torch.no_grad():
                for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
                    slow.mul_(0.9).add_(fast, alpha=0.1)
                    slow.lerp_(fast, 0.5)
                    slow.data.copy_(slow.data * 0.5 + fast.data)
        target.last.load_state_dict(online.last.state_dict())
        process.note_weights(online, "online")
        process.note_weights(target, "target")

    law_1(world_size, script)


@every_world
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_a_method_that_uses_weights_by_hand_evaluates(world_size, guard):
    """As a `generate` or `encode` method of a plain model does."""

    class Methods(Tower):
        def encode(self, x):
            x = through(self.blocks, F.linear(x, self.first.weight, self.first.bias))
            return x @ self.last.weight.t() + self.last.bias

    def script(process: Process) -> None:
        module, optimizer = process.ready(Methods)
        for index, batch in enumerate(rows(2)):
            with guard():
                got = process.mean(lambda x: module.encode(x).mean(), batch)
            wanted = process.mean(lambda x: module.encode(x).mean(), batch)
            torch.testing.assert_close(got.clone(), wanted.detach())
            process.note_mean(f"{index} eval", wanted)
            process.step(index, module, optimizer, squared(module), batch)

    for stage in (0, 1, 3):  # a gathered slice may take another kernel: not bitwise between stages
        law_1(world_size, script, stages=(stage,), fine_units=stage == 3)


@every_world
def test_parameter_groups_with_their_own_rates_and_frozen_ones_train(world_size):
    def groups(module):
        decayed = [p for p in module.parameters() if p.dim() > 1]
        others = [p for p in module.parameters() if p.dim() <= 1]
        return torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": 0.5},
                {"params": others, "weight_decay": 0.0, "lr": 0.05},
            ],
            lr=1e-2, eps=1e-4,
        )  # fmt: skip

    def part(module):
        return torch.optim.SGD(module.blocks.parameters(), lr=0.1, momentum=0.9)

    law_1(world_size, training(Tower, optimizer=groups))
    law_1(world_size, training(Tower, optimizer=part))


@every_world
def test_a_functional_call_with_the_modules_own_parameters_trains(world_size):
    def loss(module):
        def of(x):
            parameters = dict(module.named_parameters())
            return torch.func.functional_call(module, parameters, (x,)).square().mean()

        return of

    law_1(world_size, training(Tower, loss))


class Hyper(nn.Module):
    """Computes weights of a block by another module, and calls the block with them."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.block, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        weights = {name: p * self.scale for name, p in self.block.named_parameters()}
        return self.last(torch.func.functional_call(self.block, weights, (self.first(x),)))


@every_world
def test_computed_weights_work_in_one_unit_and_elsewhere_the_error_says_so(world_size):
    law_1(world_size, training(Hyper, units=[]))

    def body(rank, stage):
        module = onefold.shard(seeded(Hyper), stage=stage, units=lambda module: True)
        with pytest.raises(
            onefold.StateError, match=r"(?s)computed values in its place.*units=\[\]"
        ):
            module(rows()[0])

    for stage in (0, 3):
        run_ranks(world_size, body, stage)


READERS = {
    "numpy": lambda weight: weight.detach().numpy(),
    "array": lambda weight: np.asarray(weight.data),
    "dlpack": lambda weight: torch.from_dlpack(weight.detach()),
}


@pytest.mark.parametrize("how", READERS)
def test_a_weight_can_be_read_through_memory_that_numpy_shares(how):
    """numpy keeps the bytes of a storage from being freed; DTensor has none for DLPack."""

    def script(process: Process) -> None:
        module, optimizer = process.ready(Tower)
        seen = list[Tensor]()

        def look(part, *_):
            seen.append(torch.tensor(READERS[how](part.weight).std().item()))

        module.last.register_forward_pre_hook(look)
        module.first.register_forward_hook(look)
        for index, batch in enumerate(rows()):
            process.mean(squared(module), batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            look(module.first)
            process.note(f"{index}", torch.stack(seen[-1:]))
        process.note_weights(module)

    law_1(3, script)


# narrower compute


class Reading(Tower):
    """Uses weights of the root and of blocks by hand."""

    def forward(self, x):
        x = through(self.blocks, F.linear(x, self.first.weight.to(x.dtype)))
        x = x @ self.blocks[0].up.weight.to(x.dtype).t() @ self.blocks[1].up.weight.to(x.dtype)
        return self.last(x)


class Renewing(Tower):
    """Halves a weight of its own in every forward, and recomputes a block."""

    def forward(self, x):
        with torch.no_grad():
            self.last.weight.mul_(0.5)
        x = checkpoint(self.blocks[0], self.first(x), use_reentrant=False)
        return self.last(self.blocks[1](x))


def _attending() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, WIDTH)),
        nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True),
        nn.Flatten(),
    )


def _recurrent() -> nn.Module:
    return nn.Sequential(linear(), nn.Unflatten(1, (2, 4)), nn.LSTM(4, 3, batch_first=True))


def _tied() -> nn.Module:
    tower = Tower()
    tower.blocks[1].up.weight = tower.blocks[0].up.weight
    tower.first.weight.requires_grad_(False)
    tower.unused = nn.Parameter(torch.ones(3))
    return tower


def penalised(module: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: (
        squared(module)(x).float()
        + 0.01 * sum(p.float().pow(2).sum() for p in module.blocks.parameters())
    )


@odd_worlds
@pytest.mark.parametrize(
    ("build", "loss"),
    [(Reading, squared), (Renewing, squared), (_attending, squared), (_tied, penalised),
     (_recurrent, lambda module: lambda x: module(x)[0].square().mean())],
    ids=["by hand", "in place", "attention", "tied, frozen, penalised", "recurrent"],
)  # fmt: skip
def test_bf16_compute_is_the_same_at_every_stage_and_near_fp32(world_size, build, loss):
    def script(process: Process) -> None:
        options = {} if process.is_plain else {"precision": "bf16"}
        module, optimizer = process.ready(build, sgd, **options)
        for index, batch in enumerate(rows(2)):
            value = process.mean(lambda x: loss(module)(x).float(), batch)
            value.backward()
            process.note_mean(f"{index} loss", value)
            process.note_grads(f"{index}", module)
            optimizer.step()
            optimizer.zero_grad()
        process.note_weights(module)

    law_1(world_size, script, relative=2e-3)


class Scaled(torch.autograd.Function):
    """What a fused kernel is to autograd: it is given the weight itself."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0)


@every_world
def test_a_custom_function_given_its_modules_weight_trains(world_size):
    class Scaling(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH))
            self.inner = linear()

        def forward(self, x):
            return self.inner(Scaled.apply(x, self.weight))

    law_1(world_size, training(lambda: nn.Sequential(Scaling(), Scaling())))


@every_world
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_custom_function_given_another_modules_weight_trains_or_is_an_error(world_size, stage):
    """Autograd functions do not ask a tensor's class; a wrong gradient must not come of it."""

    class Root(Tower):
        def forward(self, x):
            x = Scaled.apply(self.first(x), self.blocks[0].down.bias)
            return self.last(through(self.blocks, x))

    try:
        law_1(world_size, training(Root), stages=(stage,), fine_units=False)
    except onefold.StateError as error:
        assert "'blocks.0.down.bias'" in str(error)


@every_world
@pytest.mark.parametrize("reentrant", [False, True])
def test_recompute_that_is_given_a_weight_trains_or_is_an_error(world_size, reentrant):
    class Root(Tower):
        def forward(self, x):
            x = checkpoint(
                F.linear, self.first(x), self.blocks[0].down.weight.t(), use_reentrant=reentrant
            )
            return self.last(torch.cat([x, x[:, :1]], 1))

    try:
        law_1(world_size, training(Root))
    except onefold.StateError as error:
        assert "'blocks.0.down.weight'" in str(error)


@every_world
def test_a_custom_function_given_another_modules_weight_by_full_tensor_trains(world_size):
    """As fused losses read the head of a language model, tied or not, where it is a DTensor."""

    class Fused(nn.Module):
        def __init__(self, tied: bool):
            super().__init__()
            self.inner, self.scale = linear(), Scale()
            self.other = self.scale if tied else Scale()

        def forward(self, x):
            weight = self.other.weight
            full = weight.full_tensor() if isinstance(weight, DTensor) else weight.view_as(weight)
            return self.scale(self.inner(Scaled.apply(x, full)))

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH))

        def forward(self, x):
            return x * self.weight

    for tied in (False, True):
        law_1(world_size, training(lambda tied=tied: Fused(tied)))
