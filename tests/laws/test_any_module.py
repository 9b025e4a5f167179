"""Law 6: any module trains sharded as it does in one process; one clause for each kind."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
from tests.support.clauses import GUARDS, REENTRANT, Clauses
from tests.support.programs import blocks as kinds
from tests.support.ranks import run_processes, run_ranks, seeded
from tests.support.zoo import (
    ROWS,
    SUMS,
    WIDTH,
    Process,
    Residual,
    Tower,
    adamw_of_trainable,
    rows,
    run_plain,
    squared,
    tokens,
    training,
)

clauses = Clauses()


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


def repeat(make: Callable[[], nn.Module], count: int = 2) -> nn.ModuleList:
    return nn.ModuleList(make() for _ in range(count))


def through(layers: Any, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def repeated(make: Callable[[], nn.Module], count: int = 2) -> nn.Module:
    """Blocks one after the other, and nothing else."""
    return From(lambda self, x: through(self.blocks, x), blocks=repeat(make, count))


# tied parameters


@clauses.module(batches=tokens())
def a_head_tied_to_the_embedding_trains():
    net = From(
        lambda self, x: self.head(through(self.blocks, self.embed(x))),
        embed=nn.Embedding(20, WIDTH), blocks=repeat(Residual),
        head=nn.Linear(WIDTH, 20, bias=False),
    )  # fmt: skip
    net.head.weight = net.embed.weight
    return net


@clauses.module()
def a_weight_tied_between_two_blocks_trains():
    tower = Tower(3)
    tower.blocks[2].up.weight = tower.blocks[0].up.weight
    tower.blocks[2].up.bias = tower.blocks[0].up.bias
    return tower


@clauses.module(loss=lambda m: lambda x: m(x).square().mean() + m.square(x).square().mean())
def a_weight_tied_between_a_block_and_the_rest_trains():
    tower = Tower(2)
    tower.square = nn.Linear(WIDTH, 7)
    tower.square.weight = tower.blocks[1].up.weight
    return tower


@clauses.module()
def a_three_way_tie_trains():
    net = From(
        lambda self, x: self.c(torch.tanh(self.b(torch.tanh(self.a(x))))),
        a=linear(), b=linear(), c=linear(),
    )  # fmt: skip
    net.b.weight = net.c.weight = net.a.weight
    return net


@clauses.module()
def a_tied_module_under_two_names_trains():
    shared = Residual()
    return From(
        lambda self, x: through([*self.one, *self.two], x),
        one=nn.ModuleList([shared, Residual()]), two=nn.ModuleList([Residual(), shared]),
    )  # fmt: skip


# frozen parameters


@clauses.module()
def a_frozen_module_keeps_its_values_and_has_no_gradient():
    tower = Tower()
    tower.blocks[0].requires_grad_(False)
    tower.first.requires_grad_(False)
    return tower


@clauses.module()
def a_frozen_part_of_a_unit_keeps_its_values():
    tower = Tower()
    for block in tower.blocks:
        block.up.weight.requires_grad_(False)
        block.down.bias.requires_grad_(False)
    tower.last.weight.requires_grad_(False)
    return tower


@clauses.module("low_rank_adapters_beside_a_frozen_base_train-adamw")
@clauses.module(
    "low_rank_adapters_beside_a_frozen_base_train-adamw_of_trainable", optimizer=adamw_of_trainable
)
def adapted():
    return From(
        lambda self, x: self.head(through(self.blocks, self.first(x))),
        first=linear(), blocks=repeat(kinds.Frozen, 3), head=linear().requires_grad_(False),
    )  # fmt: skip


@clauses.module()
def a_frozen_base_is_whole_after_all_adapter_gradients_are_complete():
    """The adapters act on the block's output, so their gradients are complete first."""
    late = lambda: From(
        lambda self, x: self.base(x) * self.scale,
        base=nn.Sequential(linear(), nn.Tanh(), linear()).requires_grad_(False),
        scale=nn.Parameter(torch.ones(WIDTH)),
    )
    return From(
        lambda self, x: through(self.blocks, self.first(x)), first=linear(), blocks=repeat(late)
    )


@clauses.script()
def requires_grad_may_change_between_steps(process):
    module, optimizer = process.ready(Tower)
    for index, _ in process.steps(module, optimizer, 4):
        module.blocks[0].requires_grad_(index in (0, 3))
        module.last.bias.requires_grad_(index != 1)


@clauses.script()
def a_module_frozen_at_first_may_be_unfrozen(process):
    module, optimizer = process.ready(lambda: Tower().requires_grad_(False))
    module.last.requires_grad_(True)
    for index, _ in process.steps(module, optimizer, 3):
        module.blocks.requires_grad_(index > 0)


@clauses.script()
def a_wholly_frozen_module_passes_gradients_to_its_input(process):
    frozen, _ = process.ready(lambda: Tower().requires_grad_(False))
    module, optimizer = process.ready(linear)
    for index, batch in enumerate(rows()):
        process.step(index, module, optimizer, lambda x: frozen(module(x)).square().mean(), batch)
    process.note_weights(module)
    process.note_weights(frozen, "frozen")


# unused parameters


@clauses.module(
    optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.5)
)
def parameters_unused_on_every_rank_have_no_gradient_and_do_not_decay():
    tower = Tower()
    tower.blocks[0].spare = linear()
    tower.spare = nn.Parameter(torch.ones(5, 3))
    tower.island = nn.Sequential(linear(), linear())
    return tower


def by_half() -> list[tuple[Tensor, Tensor]]:
    """Rows with a mark that is 0 on the first ranks and 1 on the last ones (on 1 rank: 0)."""
    marks = (torch.arange(ROWS) >= ROWS // 2).float()
    return [(batch, marks) for batch in rows()]


def marked(module: nn.Module) -> Callable[[tuple[Tensor, Tensor]], Tensor]:
    return lambda part: (module(*part) - 1).square().mean()


BY_HALF = {"loss": marked, "batches": by_half(), "fine_units": False, "by_part": True}


@clauses.module(**BY_HALF, units=[])
def parameters_used_on_some_ranks_only_have_the_mean_gradient():
    """One of two layers, as the first row's mark says; both ways within one unit."""
    return From(
        lambda self, x, mark: torch.tanh(self.two(x) * self.scale if mark[0] else self.one(x)),
        one=linear(), two=linear(), never=linear(), scale=nn.Parameter(torch.ones(())),
    )  # fmt: skip


@clauses.module(**BY_HALF)
def several_units_used_in_part_by_some_ranks_have_the_mean_gradient():
    """One rank completes a unit that another never does; their collectives must still agree."""

    def forward(self, x, mark):
        x = torch.tanh(self.always(x))
        return torch.tanh(self.sometimes(x)) if mark[0] else x

    def forward_of_root(self, x, mark):
        x = self.first(x)
        for block in self.blocks:
            x = block(x, mark)
        return self.last(x)

    partly = lambda: From(forward, always=linear(), sometimes=linear())
    return From(forward_of_root, first=linear(), blocks=repeat(partly, 3), last=linear(3))


def skipping(process: Process, build: Callable[[], nn.Module]) -> None:
    """Five steps of a module that skips something in three of them."""
    module, optimizer = process.ready(build)
    for index, _ in process.steps(module, optimizer, 5):
        module.skips = index in (0, 2, 3)


@clauses.script()
def a_parameter_unused_in_one_step_is_used_in_the_next(process):
    class Sometimes(Tower):
        def forward(self, x):
            x = self.blocks[0](self.first(x))
            return self.last(x if self.skips else self.blocks[1](x))

    skipping(process, Sometimes)


@clauses.script()
def part_of_a_unit_unused_in_one_step_keeps_its_moments(process):
    def forward(self, x):
        x = torch.tanh(self.a(x))
        return self.c(x if self.skips else torch.tanh(self.b(x)))

    skipping(process, lambda: From(forward, a=linear(), b=linear(), c=linear()))


@clauses.module(loss=lambda m: lambda x: m(x)[0].square().mean())
def an_output_that_the_loss_does_not_use_gives_no_gradient():
    return From(lambda self, x: (self.used(x), self.unused(x)), used=Residual(), unused=Residual())


# odd shapes


@clauses.module()
def scalar_parameters_train():
    scaled = lambda: From(
        lambda self, x: self.inner(x) * self.scale + self.shift, inner=linear(),
        scale=nn.Parameter(torch.tensor(0.5)), shift=nn.Parameter(torch.tensor(-0.25)),
    )  # fmt: skip
    return From(
        lambda self, x: through(self.blocks, x) * self.gain,
        blocks=repeat(scaled), gain=nn.Parameter(torch.tensor(2.0)),
    )  # fmt: skip


@clauses.module()
def a_module_of_one_scalar_trains():
    return From(lambda self, x: x * self.gain, gain=nn.Parameter(torch.tensor(2.0)))


@clauses.module()
def empty_parameters_are_carried_along():
    hollow = lambda: nn.Sequential(linear(), kinds.Odd((0,), (0, 4), (5, 0)))
    return From(
        lambda self, x: through(self.blocks, x) + self.hollow.sum(),
        blocks=repeat(hollow), hollow=nn.Parameter(torch.zeros(0)),
    )  # fmt: skip


@clauses.script(fine_units=False)
def a_module_without_parameters_runs(process):
    module = nn.Sequential(nn.Tanh())
    if not process.is_plain:
        onefold.shard(module, stage=process.stage)
    process.note_mean("loss", process.mean(lambda x: module(x).mean(), rows()[0]))


@clauses.module()
def parameters_with_fewer_rows_than_ranks_train():
    odd = lambda: kinds.Odd((1, WIDTH), (2, WIDTH), (1,), (5, 1, 1, WIDTH))
    return From(
        lambda self, x: self.out(through(self.blocks, x)),
        blocks=repeat(odd), out=nn.Linear(WIDTH, 1),
    )  # fmt: skip


@clauses.module(optimizer=sgd, by_part=True)
def convolutions_and_batch_norm_train():
    return nn.Sequential(
        nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 5, 3, padding=1), nn.BatchNorm1d(5), nn.ReLU(),
        nn.ConvTranspose1d(5, 2, 3, padding=1), nn.GroupNorm(1, 2), nn.Flatten(),
    )  # fmt: skip


@clauses.module()
def a_noncontiguous_parameter_trains():
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
    return From(lambda self, x: x @ self.weight, weight=weight)


# bf16 gradients are rounded per part: fp32 accuracy is not to be had against one process
@clauses.module(optimizer=sgd, batches=rows()[:1], precision=None, relative=1e-3, fine_units=False)
def parameters_of_several_dtypes_train():
    return From(
        lambda self, x: self.last(self.quantized(self.low(x.bfloat16()).float()) * self.scale),
        low=nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16),
        quantized=From(lambda self, x: x * self.codes.float(), codes=nn.Parameter(
            torch.arange(WIDTH, dtype=torch.uint8), requires_grad=False)),
        scale=nn.Parameter(torch.ones(WIDTH, dtype=torch.float64)),
        last=linear().double(),
    )  # fmt: skip


@clauses.module(optimizer=sgd)
def complex_parameters_train():
    return From(
        lambda self, x: torch.fft.irfft(torch.fft.rfft(x) * self.filter),
        filter=nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64)),
    )


# modules called twice, in loops, by weight, or not at all


@clauses.module("a_module_called_twice_in_one_forward_trains")
class Twice(Tower):
    def forward(self, x):
        return self.last(through([*self.blocks, *self.blocks], self.first(x)))


@clauses.script()
def a_module_called_in_a_loop_of_changing_length_trains(process):
    class Looped(Tower):
        def forward(self, x):
            return self.last(through([self.blocks[0]] * self.times, self.first(x)))

    module, optimizer = process.ready(Looped)
    for index, _ in process.steps(module, optimizer, 3):
        module.times = (3, 1, 2)[index]


@clauses.script()
def the_order_of_modules_may_change_between_steps(process):
    class Shuffled(Tower):
        def forward(self, x):
            return self.last(through([self.blocks[index] for index in self.order], self.first(x)))

    module, optimizer = process.ready(partial(Shuffled, 3))
    for index, _ in process.steps(module, optimizer, 4):
        module.order = ((0, 1, 2), (2, 0), (1, 1, 0), (2, 1, 0))[index]


@clauses.module("a_recursive_call_of_the_root_trains")
class Recursive(Tower):
    def forward(self, x, depth=2):
        x = through(self.blocks, self.first(x))
        return self(x, depth - 1) if depth else self.last(x)


class Reader(nn.Module):
    """A head that reads the embedding's weight."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(20, WIDTH), repeat(Residual)
        self.norm = nn.LayerNorm(20) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(F.linear(through(self.blocks, self.embed(x)), self.embed.weight))


clauses.module("an_embedding_weight_used_by_the_parent_trains", batches=tokens())(Reader)
clauses.module("a_module_after_a_head_by_weight_trains", batches=tokens())(partial(Reader, True))


@clauses.module("a_blocks_weight_used_by_the_parent_trains")
class ReadingBlocks(Tower):
    def forward(self, x):
        x = through(self.blocks, F.linear(x, self.first.weight, self.first.bias))
        x = x @ self.blocks[0].up.weight.t() @ self.blocks[1].up.weight
        return self.last(x) + torch.einsum("oi,bi->bo", self.last.weight, x)


@clauses.module("a_blocks_weight_used_by_the_parent_before_the_block_trains")
class ReadingEarly(Tower):
    """A weight's gradient is complete only after backward has left the block."""

    def __init__(self):
        super().__init__(3)

    def forward(self, x):
        x = self.first(x) * self.blocks[0].down.bias
        x = x + x @ self.blocks[1].up.weight.t() @ self.blocks[1].up.weight
        return self.last(through(self.blocks, x) + self.last.weight.sum())


@clauses.module()
def a_weight_used_by_a_sibling_trains():
    """The sibling holds the module without owning it, so its parameters are not its own."""
    lender = linear()
    borrower = lambda: From(
        lambda self, x: torch.tanh(self.own(x)) @ self.lender[0].weight,
        own=linear(), lender=[lender],
    )  # fmt: skip
    return From(
        lambda self, x: through(self.blocks, self.lender(x)),
        lender=lender, blocks=repeat(borrower),
    )  # fmt: skip


@clauses.module()
def a_weight_used_between_two_modules_of_its_unit_trains():
    """Where the unit is whole anyway, when another module uses its weight."""
    first = linear()
    borrower = lambda: From(
        lambda self, x: torch.tanh(F.linear(self.own(x), self.lender[0].weight)),
        own=linear(), lender=[first],
    )  # fmt: skip
    return From(
        lambda self, x: self.last(through(self.blocks, self.first(x))),
        first=first, blocks=repeat(borrower), last=linear(),
    )  # fmt: skip


@clauses.module()
def a_module_whose_weights_are_used_without_calling_it_trains():
    def forward(self, x):
        for first, second in self.pairs:
            x = F.linear(torch.tanh(F.linear(x, first.weight, first.bias)), second.weight)
        return x

    return From(forward, pairs=repeat(lambda: nn.Sequential(linear(), linear())))


@clauses.module(optimizer=sgd)
def multihead_attention_trains_though_its_projection_is_never_called():
    attends = lambda: nn.Sequential(kinds.Attends(), kinds.Attends("cross"))
    return repeated(attends)


@clauses.module(of={"LSTM": "LSTM", "GRU": "GRU", "RNN": "RNN"})
def recurrent_layers_train(kind):
    return kinds.Recurrent(kind, 2, True)


# evaluation takes torch's fused path only where every weight is whole at once
@clauses.script(fine_units=False)
def a_transformer_encoder_trains_and_evaluates(process):
    def build():
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    module, optimizer = process.ready(build, sgd)
    for index, batch in enumerate(rows()):
        batch = batch.unsqueeze(1).repeat(1, 3, 1)
        process.step(index, module, optimizer, squared(module), batch)
        module.eval()
        with torch.no_grad():
            process.note_mean(f"{index} eval", process.mean(squared(module), batch))
        module.train()


@clauses.module(optimizer=sgd, batches=[x.unsqueeze(1).repeat(1, 3, 1) for x in rows()])
def a_whole_transformer_trains():
    inner = nn.Transformer(WIDTH, 2, 1, 1, 12, dropout=0.0, batch_first=True)
    return From(lambda self, x: self.inner(x, x[:, :2]), inner=inner)


@clauses.module()
def parametrized_weights_train():
    tower = Tower()
    nn.utils.parametrizations.weight_norm(tower.blocks[0].up)
    nn.utils.parametrizations.weight_norm(tower.last)
    return tower


@clauses.script()
def a_submodule_may_be_called_instead_of_the_root(process):
    module, optimizer = process.ready(Tower)
    for index, batch in enumerate(rows(3)):
        called = (module.blocks[1], module, module.first)[index]
        process.step(index, module, optimizer, squared(called), batch)
    process.note_weights(module)


@clauses.loss(batches=rows(3))
def a_method_that_is_not_forward_may_call_submodules(module, x):
    return F.linear(through(module.blocks, module.first(x)), module.last.weight).square().mean()


# outputs

PACKS = ("tuple", "list", "dict", "nested", "dataclass", "object", "object with slots",
         "namespace", "user dict")  # fmt: skip


@clauses.script(of={kind: kind for kind in PACKS}, worlds=(3, 1))
def modules_may_give_anything_that_holds_tensors(process, kind):
    def forward(self, x):
        for block in self.blocks:
            x = kinds.unpack(kind, block(x))
        return kinds.pack(kind, x * self.weight)

    build = lambda: From(
        forward, blocks=repeat(partial(kinds.Packer, kind)), weight=nn.Parameter(torch.ones(WIDTH))
    )
    training(build, lambda m: lambda x: kinds.unpack(kind, m(x)).square().mean())(process)


class Keeping(Tower):
    def forward(self, x):
        self.kept = [super().forward(x)]


@clauses.loss(build=Keeping)
def outputs_stored_on_the_module_are_trained_through(module, x):
    """A model that keeps its loss as an attribute and returns nothing."""
    assert module(x) is None
    return module.kept.pop().square().mean()


@clauses.module("outputs_may_be_changed_in_place_and_viewed")
class ChangedOutputs(Tower):
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


@clauses.module(may_fail=(onefold.StateError, "blocks."))
def outputs_that_are_hidden_are_an_error_or_are_trained_through():
    """Nobody can see into a generator; what must not happen is a wrong gradient."""

    class Hiding(Residual):
        def forward(self, x):
            return (y for y in [super(Hiding, self).forward(x)])

    def forward(self, x):
        for block in self.blocks:
            x = next(block(x))
        return x

    return From(forward, blocks=repeat(Hiding))


@clauses.module(of={"whole": 0, "slice": 1})
def a_weight_or_a_slice_of_it_may_be_the_output(first):
    """As learned position embeddings do."""

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for positions in self.positions:
            where = positions()
            x = torch.tanh(x + x @ where.t() @ where)
        return self.last(x)

    positions = repeat(partial(kinds.Positions, first))
    return From(forward, first=linear(), positions=positions, last=linear())


@clauses.module()
def the_input_or_a_view_of_it_may_be_the_output():
    def forward(self, x):
        for layer in self.passes:
            x, start, projected = layer(x)
            x = x + (start * projected).sum(1, keepdim=True)
        return x

    return From(forward, passes=repeat(kinds.Passing))


# weights that change themselves, recompute, evaluation


@clauses.module()
def a_module_may_change_its_own_weight_in_forward():
    return repeated(kinds.Clamped)


@clauses.module()
def a_module_may_change_its_own_weight_through_data_in_forward():
    return repeated(partial(kinds.Clamped, "clamp"))


@clauses.module()
def a_frozen_codebook_may_follow_its_own_rule():
    """A parameter that is updated by the module itself alike on all ranks, not by autograd."""

    def forward(self, x):
        out = self.inner(x) + self.codes.mean(0)
        if self.training:
            self.codes.mul_(0.9)
        return out

    codes = lambda: nn.Parameter(torch.randn(5, WIDTH), requires_grad=False)
    return repeated(lambda: From(forward, codes=codes(), inner=linear()))


def recomputing(forward: Callable[..., Tensor], count: int = 2, chained: bool = False) -> Tower:
    """A tower with another forward; `chained`: its blocks are one Sequential."""
    tower = type("Recomputing", (Tower,), {"forward": forward})(count)
    if chained:
        tower.blocks = nn.Sequential(*tower.blocks)
    return tower


@clauses.module(of=REENTRANT)
def recompute_of_each_block_trains(reentrant):
    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return self.last(x)

    return recomputing(forward, 3)


@clauses.module(of=REENTRANT)
def recompute_of_several_blocks_at_once_trains(reentrant):
    def forward(self, x):
        x = checkpoint_sequential(self.blocks, 2, self.first(x), use_reentrant=reentrant)
        return self.last(x)

    return recomputing(forward, 4, chained=True)


@clauses.module(worlds=(3, 1))
def selective_recompute_of_several_units_at_once_trains():
    """Recompute runs the operations that it counted, and gathers more than forward did."""
    saved = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])

    def forward(self, x):
        x = checkpoint(self.first, x, use_reentrant=False, context_fn=saved)
        x = checkpoint(self.blocks, x, use_reentrant=False, context_fn=saved)
        return self.last(x)

    return recomputing(forward, 3, chained=True)


@clauses.module(of=REENTRANT)
def recompute_inside_a_block_trains(reentrant):
    class Inner(Residual):
        def forward(self, x):
            hidden = checkpoint(self.up, x, use_reentrant=reentrant)
            rest = lambda h: self.down(torch.tanh(h))
            return x + checkpoint(rest, hidden, use_reentrant=reentrant)

    tower = Tower()
    tower.blocks = repeat(Inner)
    return tower


@clauses.script(of=REENTRANT)
def recompute_of_the_whole_module_trains(process, reentrant):
    module, optimizer = process.ready(Tower)
    loss = lambda x: checkpoint(module, x.requires_grad_(), use_reentrant=reentrant)
    for index, batch in enumerate(rows()):
        process.step(index, module, optimizer, lambda x: loss(x).square().mean(), batch)
    process.note_weights(module)


@clauses.module("recompute_within_recompute_trains")
class NestedRecompute(Tower):
    def forward(self, x):
        def inner(x):
            x = checkpoint(self.blocks[0], x, use_reentrant=False)
            return checkpoint(self.blocks[1], x, use_reentrant=False)

        return self.last(checkpoint(inner, self.first(x), use_reentrant=False))


@clauses.script(of=GUARDS)
def evaluation_between_steps_changes_nothing(process, guard):
    module, optimizer = process.ready(Tower)
    for index, batch in process.steps(module, optimizer, 3):
        module.eval()
        with guard():
            process.note_mean(f"{index} eval", process.mean(squared(module), batch * 2))
        module.train()
    with guard():
        process.note_mean("last eval", process.mean(squared(module), rows(3)[0]))


@clauses.script(of=GUARDS)
def evaluation_between_forward_and_backward_changes_nothing(process, guard):
    module, optimizer = process.ready(Tower)
    for index, batch in enumerate(rows(2)):
        loss = process.mean(squared(module), batch)
        with guard():
            process.note_mean(f"{index} eval", process.mean(squared(module), batch * 2))
        loss.backward()
        with guard():
            process.note_mean(f"{index} eval after", process.mean(squared(module), batch * 3))
        process.update(index, module, optimizer)
    process.note_weights(module)


# several forwards, losses and backwards


@clauses.loss()
def two_forwards_before_one_backward_train(module, x):
    return module(x).square().mean() + (module(x * 2) - 1).square().mean()


@clauses.loss(build=lambda: nn.Sequential(Residual(), Residual()))
def a_module_fed_with_its_own_output_trains(module, x):
    return module(module(module(x))).square().mean()


@clauses.script(stages=SUMS)
def two_losses_of_one_forward_with_two_backwards_train(process):
    module, optimizer = process.ready(Tower)
    for index, batch in enumerate(rows()):
        out = module(torch.cat(process.parts(batch)))
        first, second = out.square().mean(), (out[:, 0] - 1).square().mean()
        first.backward(retain_graph=True)
        process.note_grads(f"{index} first", module)
        second.backward()
        process.update(f"{index} both", module, optimizer)
    process.note_weights(module)


@clauses.script(stages=SUMS)
def a_second_backward_through_a_retained_graph_doubles_gradients(process):
    module, optimizer = process.ready(Tower)
    for index, batch in enumerate(rows()):
        loss = process.mean(squared(module), batch)
        loss.backward(retain_graph=True)
        loss.backward()
        process.update(index, module, optimizer)
    process.note_weights(module)


@clauses.script(stages=SUMS)
def backwards_of_two_forwards_in_any_order_train(process):
    module, optimizer = process.ready(Tower)
    for index, batch in enumerate(rows()):
        one = process.mean(squared(module), batch)
        two = process.mean(squared(module), batch * 2)
        for loss in (one, two) if index else (two, one):
            loss.backward()
        process.update(index, module, optimizer)
    process.note_weights(module)


@clauses.loss()
def a_gradient_penalty_through_a_second_derivative_trains(module, x):
    x = x.clone().requires_grad_()
    out = module(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.square().mean() + (slope.norm(dim=1) - 1).square().mean()


@clauses.script()
def gradients_of_inputs_alone_leave_parameters_without_gradient(process):
    module, optimizer = process.ready(Tower)
    for index, batch in process.steps(module, optimizer):
        part = torch.cat(process.parts(batch)).requires_grad_()
        (slope,) = torch.autograd.grad(module(part).square().sum(), part)
        process.note_mean(f"{index} slope", slope.square().mean())
        process.note_grads(f"{index} none", module)


@clauses.loss()
def backward_of_part_of_the_parameters_leaves_the_others_alone(module, x):
    """Only the last module is in the graph: the others were run without gradients."""
    with torch.no_grad():
        hidden = through(module.blocks, module.first(x))
    return module.last(hidden).square().mean()


@clauses.module("no_grad_inside_forward_is_respected")
class PartlyDetached(Tower):
    def forward(self, x):
        with torch.no_grad():
            x = self.blocks[0](self.first(x))
        return self.last(self.blocks[1](x))


# exceptions


class Oops(Exception):
    pass


def _raise(_: Tensor) -> None:
    raise Oops


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


FAILURES = {f"{first}-{where}": (first, where) for first in (0, 1) for where in
            ("forward", "backward")}  # fmt: skip


@clauses.script(of=FAILURES)
def steps_after_an_exception_are_those_of_a_run_without_it(process, failure):
    module, optimizer = process.ready(Failing)
    for index, batch in process.steps(module, optimizer, 4):
        if index == failure[0] and not process.is_plain:
            module.fails = failure[1]
            with pytest.raises(Oops):
                process.mean(squared(module), batch * 3).backward()
            module.fails = ""
            optimizer.zero_grad()


@clauses.script(of={"root": "root", "block": "block"})
def edits_after_a_failed_backward_are_those_of_the_parameters_before_it(process, called):
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


@clauses.script()
def a_part_that_no_hook_sees_trains_after_a_failed_backward(process):
    """Its parameters are those of a list, which is never called."""
    listed = lambda: From(
        lambda self, x: torch.tanh(x * self.gains[0]) * self.gains[1],
        gains=nn.ParameterList(nn.Parameter(torch.ones(WIDTH) + i) for i in range(2)),
    )
    module, optimizer = process.ready(lambda: nn.Sequential(listed(), linear()))
    for index, batch in enumerate(rows(2)):
        x = batch.clone().requires_grad_()
        x.register_hook(_raise)
        with pytest.raises(Oops):
            process.mean(squared(module), x).backward()
        module.zero_grad()
        process.step(f"{index} part", module, optimizer, squared(module[0]), batch)
        process.step(f"{index} root", module, optimizer, squared(module), batch)
    process.note_weights(module)


@clauses.script()
def an_exception_in_a_submodule_called_directly_leaves_it_usable(process):
    class Fragile(Residual):
        fails = False

        def forward(self, x):
            hidden = self.up(x)
            if self.fails:
                raise Oops
            return x + self.down(hidden)

    def build():
        tower = Tower()
        tower.blocks = repeat(Fragile)
        return tower

    module, optimizer = process.ready(build)
    for _, batch in process.steps(module, optimizer, 3):
        module.blocks[1].fails = True
        for called in (module, module.blocks[1]):
            with pytest.raises(Oops):
                called(batch)
        with pytest.raises(Oops), torch.no_grad():
            module(batch)
        module.blocks[1].fails = False


@clauses.script()
def an_exception_in_recompute_leaves_the_next_step_right(process):
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

    module, optimizer = process.ready(Recomputing)
    for index, batch in process.steps(module, optimizer, 3):
        if index == 1 and not process.is_plain:
            module.countdown = 2
            loss = process.mean(squared(module), batch)
            with pytest.raises(Oops):
                loss.backward()
            optimizer.zero_grad()
        module.countdown = -1


@clauses.script()
def a_forward_whose_loss_is_dropped_leaves_the_next_step_right(process):
    module, optimizer = process.ready(Tower)
    for index, batch in enumerate(rows(3)):
        if not process.is_plain:
            process.mean(squared(module), batch * 2)
        process.step(index, module, optimizer, squared(module), batch)
        if not process.is_plain:
            module.blocks[0](batch)
    process.note_weights(module)


# what happens to gradients and weights between backward and forward


@clauses.script(stages=SUMS)
def gradient_clipping_by_norm_trains(process):
    module, optimizer = process.ready(Tower)
    for index, batch in enumerate(rows()):
        process.mean(squared(module), batch).backward()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 0.05)
        process.note(f"{index} norm", norm)
        process.update(index, module, optimizer)
    process.note_weights(module)


@clauses.script()
def gradient_clipping_by_value_trains(process):
    module, optimizer = process.ready(Tower)
    for index, batch in enumerate(rows()):
        process.mean(squared(module), batch).backward()
        torch.nn.utils.clip_grad_value_(module.parameters(), 0.01)
        process.update(index, module, optimizer)
    process.note_weights(module)


@clauses.script()
def gradients_changed_by_hand_are_stepped(process):
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


@clauses.script()
def a_sum_goes_on_from_gradients_whose_data_was_replaced(process):
    module, optimizer = process.ready(Tower)
    for index, batch in enumerate(rows(4)):
        process.mean(squared(module), batch).backward()
        if index % 2 == 0:
            for parameter in module.parameters():
                parameter.grad.data = parameter.grad.data * 0.5
            continue
        process.update(index, module, optimizer)
    process.note_weights(module)


@clauses.script()
def gradients_cleared_by_the_module_or_to_zero_start_afresh(process):
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


@clauses.script(stages=SUMS)
def gradients_that_are_never_cleared_add_up(process):
    module, optimizer = process.ready(Tower)
    for index, batch in enumerate(rows(3)):
        process.mean(squared(module), batch).backward()
        process.note_grads(f"{index}", module)
        optimizer.step()
    process.note_weights(module)


@clauses.script()
def weights_edited_between_steps_are_trained_on(process):
    module, optimizer = process.ready(Tower)
    for index, batch in enumerate(rows(3)):
        process.step(index, module, optimizer, squared(module), batch)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(0.9)
            module.first.weight.zero_()
            module.last.bias.fill_(0.25)
    process.note_weights(module)


@clauses.loss()
def a_penalty_on_all_parameters_is_part_of_the_gradient(module, x):
    penalty = sum(p.pow(2).sum() for p in module.parameters())
    return module(x).square().mean() + 0.01 * penalty


@clauses.loss()
def a_penalty_after_the_forward_is_part_of_the_gradient(module, x):
    out = module(x).square().mean()
    norms = torch.stack([p.norm() for p in module.blocks.parameters()])
    return out + 0.01 * norms.sum() + module.last.weight[0].abs().sum()


@clauses.script()
def a_penalty_alone_gives_gradients_without_a_forward(process):
    module, optimizer = process.ready(Tower)
    for index in range(3):
        sum((p * p).sum() for p in module.blocks.parameters()).backward()
        process.update(index, module, optimizer)
    process.note_weights(module)


# several modules in one process


@clauses.script()
def two_models_that_train_each_other_in_turn(process):
    """A generator and a discriminator, each with its own loss and optimizer."""
    maker, maker_steps = process.ready(Tower)
    judge, judge_steps = process.ready(lambda: nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)))

    def judged(x):
        made = maker(x).detach()
        return judge(made).square().mean() - judge(x[:, :3]).tanh().mean()

    for index, batch in enumerate(rows()):
        process.step(f"{index} judge", judge, judge_steps, judged, batch)
        process.step(f"{index} maker", maker, maker_steps, lambda x: -judge(maker(x)).mean(), batch)
        judge_steps.zero_grad()
    process.note_weights(maker, "maker")
    process.note_weights(judge, "judge")


@clauses.script()
def two_models_with_one_loss_and_one_optimizer(process):
    one, _ = process.ready(Tower, sgd)
    two, _ = process.ready(lambda: nn.Linear(3, 3), sgd)
    both = torch.optim.AdamW([*one.parameters(), *two.parameters()], lr=1e-2, eps=1e-4)
    for index, batch in enumerate(rows()):
        process.mean(lambda x: (two(one(x)) - 1).square().mean(), batch).backward()
        process.note_grads(f"{index} one", one)
        process.update(f"{index} two", two, both)
    process.note_weights(one, "one")
    process.note_weights(two, "two")


@clauses.script()
def a_teacher_and_a_student_train_with_one_loss(process):
    teacher, _ = process.ready(lambda: Tower(3).eval().requires_grad_(False))
    student, optimizer = process.ready(partial(Tower, 1))

    def gap(x):
        with torch.no_grad():
            wanted = teacher(x)
        return (student(x) - wanted).square().mean()

    for index, batch in enumerate(rows()):
        process.step(index, student, optimizer, gap, batch)
    process.note_weights(student)


# kinds of roots


@clauses.module()
def nested_lists_of_modules_train():
    return From(
        lambda self, x: through([block for row in self.rows for block in row], x),
        rows=repeat(lambda: repeat(Residual)),
    )


@clauses.module()
def lists_and_dicts_of_parameters_train():
    return From(
        lambda self, x: x * self.list[0] + self.list[1] + x @ self.table["a"],
        list=nn.ParameterList([torch.ones(WIDTH), torch.zeros(1)]),
        table=nn.ParameterDict({"a": torch.randn(WIDTH, WIDTH), "unused": torch.ones(2)}),
    )


@clauses.module()
def a_model_whose_only_parameters_are_on_the_root_trains():
    return From(
        lambda self, x: self.act(F.linear(x, self.weight, self.bias)), act=nn.Tanh(),
        weight=nn.Parameter(torch.randn(5, WIDTH)), bias=nn.Parameter(torch.zeros(5)),
    )  # fmt: skip


@clauses.module(of={"one layer": False, "sequential": True})
def a_torch_module_may_be_the_root(several):
    layers = (linear(), nn.Tanh(), linear(), nn.LayerNorm(WIDTH), linear())
    return nn.Sequential(*layers) if several else linear()


@clauses.module()
def experts_that_no_row_reaches_have_the_gradient_of_one_process():
    """Every expert runs on every rank; a rank may have no rows for it."""
    return nn.Sequential(kinds.Experts(4), kinds.Experts(4))


@clauses.module(of={"1": 1, "2": 2, "5": 5}, fine_units=False)
def experts_that_some_ranks_skip_train_as_in_one_process(num_blocks):
    """A mixture is one unit, so what each rank calls inside it is its own affair."""
    return From(
        lambda self, x: self.last(through(self.blocks, self.first(x))),
        first=linear(), last=linear(3),
        blocks=repeat(partial(kinds.Experts, 4, skips=True), num_blocks),
    )  # fmt: skip


@clauses.loss()
def keyword_inputs_and_inputs_that_need_gradients_train(module, x):
    return module(x=x.clone().requires_grad_()).square().mean()


@clauses.loss(relative=1e-3)
def autocast_around_forward_trains_alike_at_every_stage(module, x):
    with torch.autocast("cpu", torch.bfloat16):
        return module(x).float().square().mean()


@clauses.script(worlds=(1,))
def dropout_is_that_of_one_process_under_the_same_seed(process):
    module, optimizer = process.ready(
        lambda: nn.Sequential(linear(), nn.Dropout(0.5), Residual(), nn.Dropout(0.5), linear())
    )
    torch.manual_seed(3)
    for _ in process.steps(module, optimizer):
        pass


@clauses.script(stages=((0, 1), (2, 3)))
def accumulated_micro_batches_train_any_module(process):
    """Tied, frozen, scalar and unused parameters, over two micro-batches of which one uses less."""

    class Mixed(Tower):
        def __init__(self):
            super().__init__()
            self.blocks[1].up.weight = self.blocks[0].up.weight
            self.first.weight.requires_grad_(False)
            self.gain = nn.Parameter(torch.tensor(1.5))
            self.unused = nn.Parameter(torch.ones(3))

        def forward(self, x):
            x = self.blocks[0](self.first(x))
            return self.last(x if self.skips else self.blocks[1](x)) * self.gain

    module, optimizer = process.ready(Mixed)
    for index, batch in enumerate(rows(2)):
        module.skips = index == 0
        with process.accumulating(module):
            process.mean(squared(module), batch).backward()
        module.skips = index == 1
        process.step(index, module, optimizer, squared(module), batch * 2)
    process.note_weights(module)


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


def layers_that_some_ranks_skip(process: Process, options: dict[str, Any]) -> None:
    module, optimizer = process.ready(Dropping, **options)
    for index, (batch, mark) in enumerate(dropped()):
        if index % 2:
            with process.accumulating(module):
                process.mean(marked(module), (batch, mark.flip(0))).backward()
        else:
            with torch.no_grad():
                process.mean(marked(module), (batch, mark.flip(0)))
        process.step(index, module, optimizer, marked(module), (batch, mark))
    process.note_weights(module)


for stage, options in (
    (0, {}), (1, {}), (2, {"offload": "optimizer"}), (1, {"wire": onefold.Wire("int8")})
):  # fmt: skip
    clauses.script(
        "layers_that_some_ranks_skip_train_as_in_one_process_at_stages_0_to_2",
        of={"-".join([str(stage), *options]): options}, worlds=(3,), stages=(stage,),
        relative=2e-2 if "wire" in options else 1e-6, fine_units=False, by_part=True,
    )(layers_that_some_ranks_skip)  # fmt: skip


@clauses.module(
    "root_layers_that_some_ranks_skip_are_trained_or_are_an_error", **BY_HALF, stages=(0, 1)
)
@clauses.module(
    "root_layers_that_some_ranks_skip_are_trained_or_are_an_error-stage 3", **BY_HALF, stages=(3,),
    may_fail=(onefold.OnefoldError, ""),
)  # fmt: skip
class Skipping(Tower):
    """The layers around blocks share a unit; gathering it must not depend on them."""

    def __init__(self):
        super().__init__()
        self.middle = linear()

    def forward(self, x, mark):
        x = self.blocks[0](self.first(x))
        if mark[0]:
            x = torch.tanh(self.middle(x))
        return self.last(self.blocks[1](x))


@clauses.script()
def a_graph_that_one_rank_keeps_does_not_change_the_order_of_collectives(process):
    """As when rank 0 alone keeps a validation loss for its log."""
    module, optimizer = process.ready(Tower)
    kept = []
    for _, batch in process.steps(module, optimizer, 3):
        validation = process.mean(squared(module), batch * 2)
        if process.rank == 0:
            kept.append(validation)


# more of the ordinary loop


@clauses.script()
def gradients_accumulated_and_then_cleared_are_gone(process):
    module, optimizer = process.ready(Tower)
    for index, batch in process.steps(module, optimizer, 3):
        if not process.is_plain:
            with onefold.accumulate(module):
                process.mean(squared(module), batch * 3).backward()
            module.zero_grad() if index else optimizer.zero_grad()


@clauses.script(
    stages=((0,), (1,), (2,), (3,)), fine_units=False, may_fail=(onefold.StateError, "")
)
def a_step_without_the_last_micro_batch_is_right_or_an_error(process):
    """A loop whose number of batches does not divide by the micro-batches ends like this."""
    module, optimizer = process.ready(Tower)
    process.step(0, module, optimizer, squared(module), rows()[0])
    with process.accumulating(module):
        process.mean(squared(module), rows()[1]).backward()
    optimizer.step()
    process.note_weights(module)


@clauses.script(stages=((0, 1), (2, 3)))
def between_micro_batches_a_module_may_be_looked_at(process):
    module, optimizer = process.ready(Tower)
    for _, batch in process.steps(module, optimizer):
        with process.accumulating(module):
            process.mean(squared(module), batch * 2).backward()
            with torch.no_grad():
                module(batch)
        if process.is_plain:
            continue
        with onefold.unsharded(module):
            assert module.first.weight.shape == (WIDTH, WIDTH)
        module.state_dict()
        with torch.no_grad():
            module.blocks[0](batch)
        onefold.report(module)


@clauses.script(of={"step": "step", "load": "load", "copy": "copy"})
def weights_changed_between_forward_and_backward_are_an_error_as_in_plain_torch(process, change):
    """Gradients of the old forward at the new weights would be of no function at all."""
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


@clauses.script()
def hooks_on_modules_see_every_forward_and_backward(process):
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
    for _ in process.steps(module, optimizer):
        pass
    assert seen == ["before"] * 2


@clauses.script()
def a_target_network_follows_another_module(process):
    online, optimizer = process.ready(Tower)
    target, _ = process.ready(lambda: Tower().requires_grad_(False))
    gap = lambda x: (online(x) - target(x) - 1).square().mean()
    for index, batch in enumerate(rows(2)):
        process.step(index, online, optimizer, gap, batch)
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
                slow.lerp_(fast, 0.5)
                slow.data.copy_(slow.data * 0.5 + fast.data)
    target.last.load_state_dict(online.last.state_dict())
    process.note_weights(online, "online")
    process.note_weights(target, "target")


# a gathered slice may take another kernel: not bitwise between stages
@clauses.script(of=GUARDS, stages=((0,), (1,), (3,)))
def a_method_that_uses_weights_by_hand_evaluates(process, guard):
    """As a `generate` or `encode` method of a plain model does."""
    module, optimizer = process.ready(Tower)

    def encode(x):
        x = through(module.blocks, F.linear(x, module.first.weight, module.first.bias))
        return (x @ module.last.weight.t() + module.last.bias).mean()

    for index, batch in enumerate(rows(2)):
        with guard():
            got = process.mean(encode, batch)
        wanted = process.mean(encode, batch)
        torch.testing.assert_close(got.clone(), wanted.detach())
        process.note_mean(f"{index} eval", wanted)
        process.step(index, module, optimizer, squared(module), batch)


def groups(module: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in module.parameters() if p.dim() > 1]
    others = [p for p in module.parameters() if p.dim() <= 1]
    several = [
        {"params": decayed, "weight_decay": 0.5},
        {"params": others, "weight_decay": 0.0, "lr": 0.05},
    ]
    return torch.optim.AdamW(several, lr=1e-2, eps=1e-4)


def part(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.blocks.parameters(), lr=0.1, momentum=0.9)


for optimizer in (groups, part):
    clauses.module(
        f"parameter_groups_with_their_own_rates_and_frozen_ones_train-{optimizer.__name__}",
        optimizer=optimizer,
    )(Tower)


@clauses.loss()
def a_functional_call_with_the_modules_own_parameters_trains(module, x):
    parameters = dict(module.named_parameters())
    return torch.func.functional_call(module, parameters, (x,)).square().mean()


@clauses.module("computed_weights_work_in_one_unit", units=[])
class Hyper(nn.Module):
    """Computes weights of a block by another module, and calls the block with them."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.block, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        weights = {name: p * self.scale for name, p in self.block.named_parameters()}
        return self.last(torch.func.functional_call(self.block, weights, (self.first(x),)))


READERS = {
    "numpy": lambda weight: weight.detach().numpy(),
    "array": lambda weight: np.asarray(weight.data),
    "dlpack": lambda weight: torch.from_dlpack(weight.detach()),
}


@clauses.script(of=READERS, worlds=(3,))
def a_weight_can_be_read_through_memory_that_numpy_shares(process, read):
    """numpy keeps the bytes of a storage from being freed; DTensor has none for DLPack."""
    module, optimizer = process.ready(Tower)
    seen = list[Tensor]()

    def look(part, *_):
        seen.append(torch.tensor(read(part.weight).std().item()))

    module.last.register_forward_pre_hook(look)
    module.first.register_forward_hook(look)
    for index, batch in enumerate(rows()):
        process.mean(squared(module), batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        look(module.first)
        process.note(f"{index}", torch.stack(seen[-1:]))
    process.note_weights(module)


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


NARROW = {
    "by hand": (Reading, squared), "in place": (Renewing, squared),
    "attention": (_attending, squared), "tied, frozen, penalised": (_tied, penalised),
    "recurrent": (_recurrent, lambda module: lambda x: module(x)[0].square().mean()),
}  # fmt: skip


@clauses.script(of=NARROW, worlds=(3, 1), relative=2e-3)
def bf16_compute_is_the_same_at_every_stage_and_near_fp32(process, pair):
    build, loss = pair
    module, optimizer = process.ready(
        build, sgd, **({} if process.is_plain else {"precision": "bf16"})
    )
    for index, batch in enumerate(rows(2)):
        process.step(index, module, optimizer, lambda x: loss(module)(x).float(), batch)
    process.note_weights(module)


@clauses.module()
def a_custom_function_given_its_modules_weight_trains():
    return nn.Sequential(kinds.Scaling(), kinds.Scaling())


@clauses.module(
    "a_custom_function_given_another_modules_weight_trains_or_is_an_error",
    stages=((0,), (1,), (3,)), fine_units=False,
    may_fail=(onefold.StateError, "'blocks.0.down.bias'"),
)  # fmt: skip
class ScalingByAnother(Tower):
    """Autograd functions do not ask a tensor's class; a wrong gradient must not come of it."""

    def forward(self, x):
        x = kinds.Scaled.apply(self.first(x), self.blocks[0].down.bias)
        return self.last(through(self.blocks, x))


@clauses.module(of=REENTRANT, may_fail=(onefold.StateError, "'blocks.0.down.weight'"))
def recompute_that_is_given_a_weight_trains_or_is_an_error(reentrant):
    def forward(self, x):
        weight = self.blocks[0].down.weight.t()
        x = checkpoint(F.linear, self.first(x), weight, use_reentrant=reentrant)
        return self.last(torch.cat([x, x[:, :1]], 1))

    return recomputing(forward)


@clauses.module(of={"untied": False, "tied": True})
def a_custom_function_given_another_modules_weight_by_full_tensor_trains(tied):
    """As fused losses read the head of a language model, tied or not, where it is a DTensor."""

    def forward(self, x):
        weight = self.other.weight
        full = weight.full_tensor() if isinstance(weight, DTensor) else weight.view_as(weight)
        return self.scale(self.inner(kinds.Scaled.apply(x, full)))

    scale = lambda: From(lambda self, x: x * self.weight, weight=nn.Parameter(torch.randn(WIDTH)))
    inner, first = linear(), scale()
    return From(forward, inner=inner, scale=first, other=first if tied else scale())


@pytest.mark.parametrize(("clause", "on"), [*clauses.cases()])
def test_any_module(clause, on):
    clause.check(on)


# errors, and one process without ranks


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_computed_weights_outside_of_their_unit_are_an_error_that_says_so(world_size):
    def body(rank, stage):
        module = onefold.shard(seeded(Hyper), stage=stage, units=lambda module: True)
        with pytest.raises(
            onefold.StateError, match=r"(?s)computed values in its place.*units=\[\]"
        ):
            module(rows()[0])

    for stage in (0, 3):
        run_ranks(world_size, body, stage)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_without_a_process_group_a_module_trains_as_before(stage):
    script = training(Tower)
    process = Process(0, 1, stage)
    script(process)
    for name, value in run_plain(script).items():
        assert value is not None
        torch.testing.assert_close(process.seen[name], value, rtol=1e-5, atol=1e-7, msg=name)


def branching() -> nn.Module:
    return From(lambda self, x, rank: self.branches[rank](x), branches=repeat(Residual))


def test_ranks_that_take_other_units_get_an_error_that_names_the_unit():
    """Law 5 where collectives must be in one order and are not: nothing is stepped, none hangs."""

    def body(rank: int) -> None:
        module = branching()
        optimizer = torch.optim.SGD(module.parameters())
        onefold.shard(module, optimizer, stage=3)
        module(torch.ones(2, WIDTH), rank).sum().backward()
        optimizer.step()  # threads have no lanes: ranks compare what they sent here

    with pytest.raises((onefold.OnefoldError, RuntimeError), match="branches"):
        run_ranks(2, body)


def evaluate_own_branch(rank: int) -> None:
    module = onefold.shard(seeded(branching), stage=3)
    with torch.no_grad(), pytest.raises(onefold.OnefoldError, match="branches"):
        module(torch.ones(2, WIDTH), rank)


@pytest.mark.process
def test_ranks_that_evaluate_other_units_get_an_error():
    """Without a backward there is no reduction to notice it by, and no step follows."""
    run_processes(2, evaluate_own_branch)
