"""Edits and reads of sharded parameters are those of one process, at every stage."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from functools import partial, wraps
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn import init
from torch.utils.checkpoint import checkpoint

import onefold
from onefold.unit.logical import warn_of_shards
from tests.support.ranks import every_rank, run_ranks, seeded
from tests.support.rows import again_but, worlds_in_turn
from tests.support.zoo import whole

ROWS = [(1, 3), (2, 0), (2, 1), (3, 2), (3, 3)]
"""World size and stage."""

rows = pytest.mark.parametrize(("world_size", "stage"), ROWS)
X = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))


class Mixed(nn.Module):
    """Parameters with more rows than ranks, as many and fewer; one of them is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.many = nn.Parameter(torch.randn(7, 3))
        self.frozen = nn.Parameter(torch.randn(5, 3), requires_grad=False)
        self.kernel = nn.Parameter(torch.randn(3, 2, 1, 2))
        self.one = nn.Parameter(torch.randn(1, 3))
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = (x @ self.many.t()).sum(1) + (x @ self.frozen.t()).sum(1) + (x @ self.one.t()).sum(1)
        return y * self.gain * self.kernel.sum()


def sharded(stage: int, **options: Any) -> tuple[Mixed, torch.optim.Optimizer]:
    module = seeded(Mixed)
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.1)
    onefold.shard(module, optimizer, stage=stage, **options)
    return module, optimizer


def values(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape)))


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def without_grad(edit: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def edited(p: Tensor) -> None:
        with torch.no_grad():
            edit(p)

    return edited


def iadd(p: Tensor) -> None:
    p += values(*p.shape)


ELEMENTWISE: dict[str, Callable[[Any], Any]] = {
    "copy_": lambda p: p.copy_(values(*p.shape)),
    "copy_ of a row": lambda p: p.copy_(values(p.shape[-1])),
    "copy_ of doubles": lambda p: p.copy_(values(*p.shape).double()),
    "add_": lambda p: p.add_(values(*p.shape), alpha=0.5),
    "augmented": iadd,
    "mul_ by a row": lambda p: p.mul_(values(1, p.shape[-1])),
    "lerp_": lambda p: p.lerp_(values(*p.shape), 0.25),
    "lerp_ by a tensor": lambda p: p.lerp_(values(*p.shape), torch.tensor(0.25)),
    "addcmul_": lambda p: p.addcmul_(values(*p.shape), values(*p.shape), value=0.5),
    "clamp_": lambda p: p.clamp_(-0.5, 0.5),
    "clamp_ to a tensor": lambda p: p.clamp_(max=values(*p.shape)),
    "masked_fill_": lambda p: p.masked_fill_(values(*p.shape) > 0.5, 0.125),
    "data": lambda p: p.data.copy_(values(*p.shape)),
    "add to data": lambda p: p.data.add_(values(*p.shape)),
    "a view": lambda p: p.view_as(values(*p.shape)).copy_(values(*p.shape)),
}

DRAWN: dict[str, Callable[[Any], Any]] = {
    "normal_": lambda p: p.normal_(generator=generator()),
    "uniform_ of data": lambda p: p.data.uniform_(2, 3, generator=generator()),
    "noise": lambda p: p.add_(torch.zeros_like(p).normal_(generator=generator())),
}

INITIALISERS: dict[str, Callable[[Any], Any]] = {
    "constant": lambda p: init.constant_(p, 0.5),
    "ones": init.ones_,
    "zeros": init.zeros_,
    "uniform": lambda p: init.uniform_(p, 3.0, 4.0, generator=generator()),
    "normal": lambda p: init.normal_(p, 5.0, 0.1, generator=generator()),
    "trunc_normal": lambda p: init.trunc_normal_(p, std=0.1, generator=generator()),
    "xavier_uniform": lambda p: init.xavier_uniform_(p, generator=generator()),
    "xavier_normal": lambda p: init.xavier_normal_(p, generator=generator()),
    "kaiming_uniform": lambda p: init.kaiming_uniform_(p, generator=generator()),
    "kaiming_normal": lambda p: init.kaiming_normal_(p, generator=generator()),
    "orthogonal": lambda p: init.orthogonal_(p, generator=generator()),
    "eye": init.eye_,
}

EDITS = {
    **{name: without_grad(edit) for name, edit in (ELEMENTWISE | DRAWN).items()},
    **INITIALISERS,
    **{f"{name} without grad": without_grad(edit) for name, edit in INITIALISERS.items()},
}


@worlds_in_turn
@rows
def test_an_edit_of_a_parameter_is_that_of_one_process(world_size, stage):
    plain = seeded(Mixed)
    wanted: dict[tuple[str, str], Tensor] = {}
    for edit in EDITS:
        for name in ("many", "frozen", "one", "kernel"):
            if edit.startswith("eye") and name == "kernel":
                continue
            EDITS[edit](getattr(plain, name))
            wanted[edit, name] = getattr(plain, name).detach().clone()

    def body(rank: int) -> None:
        module, _ = sharded(stage)
        for (edit, name), value in wanted.items():
            EDITS[edit](getattr(module, name))
            with torch.no_grad():
                found = whole(getattr(module, name))
            torch.testing.assert_close(found, value, msg=lambda m, at=(edit, name): f"{at}: {m}")
        torch.testing.assert_close(module(X), plain(X))

    run_ranks(world_size, body)


@worlds_in_turn
@rows
def test_initialisers_that_a_library_has_replaced_set_the_same_values(
    monkeypatch, world_size, stage
):
    edits = {"uniform_": "uniform", "normal_": "normal", "constant_": "constant"}
    edits |= {"kaiming_uniform_": "kaiming_uniform"}
    plain = seeded(Mixed)
    wanted = {}
    for name, edit in edits.items():
        INITIALISERS[edit](plain.frozen)
        wanted[edit] = plain.frozen.clone()
        original = getattr(init, name)
        # as transformers does while it builds a model
        monkeypatch.setattr(init, name, wraps(original)(partial(_call, original)))

    def body(rank: int) -> None:
        module, _ = sharded(stage)
        for edit, value in wanted.items():
            INITIALISERS[edit](module.frozen)
            torch.testing.assert_close(whole(module.frozen), value)

    run_ranks(world_size, body)


SHOWN: dict[str, Callable[[Any], Any]] = {
    "parameter": lambda p: p, "data": lambda p: p.data, "detach": lambda p: p.detach(),
    "detached data": lambda p: p.data.detach(),
}  # fmt: skip


@again_but(
    "1-3-detached data-False", "2-0-parameter-True", "2-1-data-False", "3-3-detach-False",
    "1-0-detach-True",
)  # fmt: skip
@worlds_in_turn
@pytest.mark.parametrize("is_inference", [False, True])
@pytest.mark.parametrize("shown", SHOWN)
@pytest.mark.parametrize(("world_size", "stage"), [*ROWS, (1, 0)])
def test_an_edit_is_made_or_refused_by_name_however_a_parameter_is_shown(
    world_size, stage, shown, is_inference
):
    edits: dict[str, Callable[[Any], Any]] = {
        "in place": lambda p: p.fill_(2), "row": lambda p: p[:].fill_(2),
        "initialised": lambda p: nn.init.constant_(p, 2),
        "initialised, doubled": lambda p: nn.init.ones_(p).mul_(2),
        "out": lambda p: torch.add(torch.ones(p.shape), 1, out=p),
        "out of own": lambda p: torch.add(p * 0, 2, out=p),
        "view": lambda p: p.view(-1).fill_(2),
    }  # fmt: skip

    def body(rank: int) -> None:
        for name, edit in edits.items():
            module, _ = sharded(stage, precision="bf16")
            before = whole(module.frozen).clone()
            try:
                with torch.inference_mode(is_inference), torch.no_grad():
                    edit(SHOWN[shown](module.frozen))
            except onefold.StateError:
                assert torch.equal(whole(module.frozen), before), name
            else:
                assert whole(module.frozen).eq(2).all(), name

    run_ranks(world_size, body)


READS: dict[str, Callable[[Any], Tensor]] = {
    "with a plain tensor": lambda p: p + torch.zeros(p.shape), "largest": lambda p: p.max(),
    "sum": lambda p: p.sum(), "stacked": lambda p: torch.stack([p, torch.zeros(p.shape)]),
    "close": lambda p: torch.tensor(torch.allclose(p, seeded(Mixed).many, rtol=0, atol=0)),
    "sorted": lambda p: p.sort(dim=0).values,
}  # fmt: skip


@pytest.mark.parametrize("is_inference", [False, True])
@pytest.mark.parametrize("shares", [None, [2.0, 1.0]])
@every_rank(2)
def test_a_read_without_gradients_sees_the_weights_at_rest_as_no_forward_rounds_them(
    rank, shares, is_inference
):
    module, _ = sharded(3, precision="bf16", wire="recommended", shares=shares)
    plain = seeded(Mixed)
    with torch.inference_mode(is_inference), torch.no_grad():
        for read in READS.values():
            got, wanted = whole(read(module.many)), read(plain.many)
            torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)


def _call(func: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return func(*args, **options)


SLICED: dict[str, Callable[[Any], Any]] = {
    "row": lambda p: p[0].zero_(),
    "last row": lambda p: p[-1].copy_(values(p.shape[-1])),
    "row by a tensor": lambda p: p[torch.tensor(0)].add_(1),
    "augmented row": lambda p: p.data[0].__iadd__(2),
    "augmented element": lambda p: add_to_element(p),
    "element": lambda p: p[0, 1].add_(1),
    "assigned element of a row": lambda p: p[0].__setitem__(1, 5.0),
    "row of a row": lambda p: p[0][1:].fill_(0.25),
    "rows": lambda p: p[1:3].mul_(2),
    "every other row": lambda p: p[::2].clamp_(-0.1, 0.1),
    "column": lambda p: p[:, 1].zero_(),
    "nothing cut": lambda p: p[...].mul_(2),
    "data": lambda p: p.data[0].uniform_(2, 3, generator=generator()),
    "detached": lambda p: p.detach()[0].zero_(),
    "a view's data": lambda p: p[0].data.detach().add_(1),
    "flat": lambda p: p.view(-1)[1:5].zero_(),
    "flattened": lambda p: p.flatten()[:4].mul_(3),
    "transposed row": lambda p: p.t()[0].mul_(2),
    "transposed column": lambda p: p.t()[:, 0].mul_(2),
    "T": lambda p: p.T[:, -1].fill_(0.5),
    "chunk": lambda p: [part.mul_(2) for part in p.chunk(2)],
    "split": lambda p: p.split(1)[-1].zero_(),
    "unbind": lambda p: p.unbind()[-1].add_(1),
    "iteration": lambda p: [row.mul_(2) for row in p],
    "select": lambda p: p.select(0, -1).zero_(),
    "torch.select": lambda p: torch.select(p, 0, 0).fill_(1),
    "narrow": lambda p: p.narrow(0, 0, 1).zero_(),
    "diagonal": lambda p: p.diagonal().fill_(1),
    "a list of rows": lambda p: torch._foreach_mul_([p[0], p[-1]], 2),
    "a row that was read before": lambda p: row_after_an_edit(p),
    "initialised": lambda p: init.normal_(p[0], generator=generator()),
    "copied from another row": lambda p: p[0].copy_(p[-1]),
}


def add_to_element(p: Tensor) -> None:
    p[0, 1] += 1


def row_after_an_edit(p: Tensor) -> None:
    row = p[0]
    p.mul_(3)
    row.add_(1)
    assert torch.equal(whole(p[0]), whole(row))


SHARES = [(1, 3, None), (2, 1, None), (3, 2, None), (3, 3, None), (2, 3, (3, 1)), (3, 1, (2, 0, 1))]
"""World size, stage and shares."""


@again_but(
    "no_grad-3-1-shares5", "inference-3-1-shares5", "grad-3-2-None", "grad-2-3-shares4",
    "grad-3-1-shares5",
)  # fmt: skip
@worlds_in_turn
@pytest.mark.parametrize(("world_size", "stage", "shares"), SHARES)
@pytest.mark.parametrize("kind", ["no_grad", "inference", "grad"])
def test_a_write_to_a_slice_of_a_parameter_is_that_of_one_process(world_size, stage, shares, kind):
    """Also where it cuts rows of several ranks: a plain script may not lose a write in silence."""
    state = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": torch.enable_grad}
    names = ["frozen"] if kind == "grad" else ["many", "frozen", "one"]
    plain, wanted = seeded(Mixed), dict[tuple[str, str], Tensor]()
    with state[kind]():
        for name in names:
            for edit in SLICED:
                SLICED[edit](getattr(plain, name))
                wanted[name, edit] = getattr(plain, name).detach().clone()

    def body(rank: int) -> None:
        module, _ = sharded(stage, shares=shares)
        for (name, edit), value in wanted.items():
            with state[kind]():
                SLICED[edit](getattr(module, name))
            now = whole(getattr(module, name))
            torch.testing.assert_close(now, value, msg=lambda m, at=(name, edit): f"{at}: {m}")
        torch.testing.assert_close(module(X), plain(X))

    run_ranks(world_size, body)


@pytest.mark.parametrize(("world_size", "shares"), [(2, None), (2, (3, 1)), (3, (2, 0, 1))])
def test_a_write_to_a_slice_of_a_gradient_is_that_of_one_process(world_size, shares):
    def edit(module: Mixed) -> None:
        grad = module.many.grad
        grad[0].zero_()
        grad[1:3].mul_(2)
        grad.view(-1)[-2:].fill_(0.5)

    plain = seeded(Mixed)
    plain(X).sum().backward()
    edit(plain)

    def body(rank: int) -> None:
        module, optimizer = sharded(3, shares=shares)
        module(X).sum().backward()
        edit(module)
        torch.testing.assert_close(whole(module.many.grad), plain.many.grad)
        optimizer.step()

    run_ranks(world_size, body)


@worlds_in_turn
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0,)])
@pytest.mark.parametrize(("world_size", "stage"), [(1, 0), (2, 2), (3, 3)])
def test_views_of_a_parameter_without_elements_have_the_shapes_of_one_process(
    shape, world_size, stage
):
    """LBFGS flattens each gradient; the rule of torch for a view of [0, 3] never ends."""
    views: list[Callable[[Any], Any]] = [
        lambda p: p.view(-1), lambda p: p.flatten(), lambda p: p.unsqueeze(0)
    ]  # fmt: skip

    def body(rank: int) -> None:
        module = seeded(Mixed)
        module.register_parameter("empty", nn.Parameter(torch.empty(shape)))
        onefold.shard(module, stage=stage)
        (module(X).sum() + module.empty.sum()).backward()
        for shown in (module.empty.grad, module.empty.data, module.empty.detach()):
            for view in views:
                assert view(shown).shape == view(torch.empty(shape)).shape

    run_ranks(world_size, body)


@pytest.mark.parametrize("shares", [None, (3, 1)])
@every_rank(2)
def test_a_write_that_cannot_reach_other_ranks_says_so(rank, shares):
    module, _ = sharded(3, shares=shares)
    with torch.no_grad():
        row = module.many[0]
        with pytest.raises(onefold.StateError, match=r"part of parameter 'many'[^$]*writeback"):
            torch.add(row, 1, out=row)
        with pytest.raises(onefold.StateError, match=r"part of parameter 'many'[^$]*writeback"):
            row.view(torch.int32).zero_()


class Reading(nn.Module):
    """Reads another module's weight in its forward, in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        parts = [*self.first.weight.chunk(2), *self.last.weight]
        return self.last(self.first(x)) + sum(part.sum() for part in parts)


@pytest.mark.parametrize("shares", [None, (3, 1)])
def test_parts_of_a_weight_are_read_in_a_forward_without_gradients(shares):
    with torch.no_grad():
        wanted = seeded(Reading)(X)

    def body(rank: int) -> None:
        module = onefold.shard(seeded(Reading), stage=3, shares=shares)
        with torch.no_grad():
            torch.testing.assert_close(module(X), wanted)

    run_ranks(2, body)


PENALTIES: dict[str, Callable[[nn.Module], Tensor]] = {
    "squares": lambda m: sum(p.pow(2).sum() for p in m.parameters()),
    "norms": lambda m: torch.stack([p.norm() for p in m.parameters()]).sum(),
    "of products": lambda m: (m.many.sum() * m.frozen.sum()).square(),
    "of a frozen one": lambda m: m.gain * m.frozen.abs().sum(),
}


@worlds_in_turn
@rows
def test_a_penalty_over_trained_and_frozen_parameters_has_the_gradient_of_one_process(
    world_size, stage
):
    plain = seeded(Mixed)
    for penalty in PENALTIES.values():
        (plain(X).mean() + 0.1 * penalty(plain)).backward()

    def body(rank: int) -> None:
        module, _ = sharded(stage)
        for penalty in PENALTIES.values():
            (module(X).mean() + 0.1 * penalty(module)).backward()
        assert module.frozen.grad is None
        for (name, p), q in zip(module.named_parameters(), plain.parameters(), strict=True):
            if p.requires_grad:
                torch.testing.assert_close(
                    whole(p.grad), q.grad, msg=lambda m, at=name: f"{at}: {m}"
                )

    run_ranks(world_size, body)


AVERAGES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add_": lambda a, p: a.mul_(0.5).add_(p, alpha=0.5),
    "lerp_": lambda a, p: a.lerp_(p, 0.5),
    "copy_": lambda a, p: a.copy_(p),
    "data": lambda a, p: a.add_(p.data),
    "detached": lambda a, p: a.add_(p.detach()),
    "lists": lambda a, p: torch._foreach_add_([a], [p]),
    "lists, lerp_": lambda a, p: torch._foreach_lerp_([a, a], [p, p.detach()], 0.5),
    "lists, copy_": lambda a, p: torch._foreach_copy_([a], [p.data]),
    "lists and plain": lambda a, p: torch._foreach_addcmul_([a], [p], [values(*p.shape)], 0.5),
    "sum": lambda a, p: a + p,
    "difference": lambda a, p: (p - a).square(),
    "plain": lambda a, p: a + values(*p.shape),
}


@worlds_in_turn
@rows
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_a_copy_of_a_parameter_computes_with_it_with_and_without_gradients(world_size, stage, grad):
    def taken(module: nn.Module) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name in ("many", "frozen", "one"):
            p = getattr(module, name)
            copies = {"clone": p.detach().clone(), "zeros": torch.zeros_like(p)}
            copies["deepcopy"] = copy.deepcopy(p.detach())
            for kind, start in copies.items():
                for use, average in AVERAGES.items():
                    a = start.clone()
                    with torch.set_grad_enabled(grad):
                        result = average(a, p)
                    shown = a if use.startswith(("lists", "copy_")) or result is a else result
                    found[f"{name}, {kind}, {use}"] = whole(shown.detach())
        return found

    wanted = taken(seeded(Mixed))

    def body(rank: int) -> None:
        module, _ = sharded(stage)
        for name, found in taken(module).items():
            torch.testing.assert_close(found, wanted[name], msg=lambda m, at=name: f"{at}: {m}")

    run_ranks(world_size, body)


@worlds_in_turn
@rows
@every_rank()
def test_copies_between_models_are_those_of_one_process(rank, world_size, stage):
    """From plain to sharded, from sharded to plain, and between models of two stages."""
    source = seeded(Mixed, seed=1)
    target, _ = sharded(stage)
    other = onefold.shard(seeded(Mixed, seed=2), stage=3 - stage)
    back = seeded(Mixed, seed=3)
    chain = [source, target, other, back]
    for before, after in pairwise(chain):
        with torch.no_grad():
            for p, q in zip(after.parameters(), before.parameters(), strict=True):
                p.copy_(q)
    for (name, p), q in zip(back.named_parameters(), source.parameters(), strict=True):
        assert torch.equal(p, q), name


@worlds_in_turn
@rows
def test_a_hidden_state_made_of_a_weight_is_a_plain_tensor(world_size, stage):
    def hidden(module: nn.Module) -> Tensor:
        weight = next(module.parameters())
        made = [
            weight.new_zeros(1, 4, 3), weight.data.new_ones((1, 4, 3)),
            weight.new_full((1, 4, 3), 2.0), weight.new_empty(1, 4, 3).zero_(),
        ]  # fmt: skip
        assert all(type(tensor) is Tensor for tensor in made)
        return sum(made)

    plain = seeded(nn.LSTM, 3, 3)
    inputs = torch.ones(2, 4, 3)
    state = hidden(plain)
    wanted, _ = plain(inputs, (state, state))

    def body(rank: int) -> None:
        module = onefold.shard(seeded(nn.LSTM, 3, 3), stage=stage)
        state = hidden(module)
        found, _ = module(inputs, (state, state))
        torch.testing.assert_close(found, wanted)
        found.sum().backward()

    run_ranks(world_size, body)


@pytest.mark.parametrize(("world_size", "shares"), [(2, None), (2, (3, 1)), (3, (2, 0, 1))])
@every_rank()
def test_gradients_and_states_are_copied_and_pickled_with_even_and_uneven_shares(
    rank, world_size, shares
):
    module, optimizer = sharded(3, shares=shares)
    module(X).sum().backward()
    optimizer.step()
    for state in (module.state_dict(), optimizer.state_dict(), [module.many.grad]):
        copied = copy.deepcopy(state)
        for mine, other in zip(tensors(state), tensors(copied), strict=True):
            assert torch.equal(whole(mine), whole(other))
            mine.mul_(2) if mine is module.many.grad else None
    assert not torch.equal(whole(module.many.grad), whole(copied[0]))


def tensors(state: Any) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    inside = state.values() if isinstance(state, dict) else state
    return [t for part in inside if isinstance(part, dict | list | Tensor) for t in tensors(part)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_sharded_optimizers_state_warns_when_it_is_pickled_and_says_what_to_call(world_size):
    def body(rank: int) -> None:
        module, optimizer = sharded(3)
        module(X).sum().backward()
        optimizer.step()
        torch.save(optimizer.state_dict(), io.BytesIO())

    warn_of_shards.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(world_size, body)
    texts = [str(warning.message) for warning in caught]
    found = [text for text in texts if "this rank's rows" in text and "use onefold.save" in text]
    assert bool(found) == (world_size > 1), texts


class Oops(Exception):
    pass


def _raise(_: Tensor) -> None:
    raise Oops


class Failing(nn.Module):
    """Two blocks; a backward can fail between them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        if self.fails:
            x.register_hook(_raise)
        return self.blocks[1](x)


@worlds_in_turn
@pytest.mark.parametrize("accumulates", [True, False])
@rows
@every_rank()
def test_a_failed_backward_loses_the_sums_before_it_and_nothing_else(
    rank, world_size, stage, accumulates
):
    """One rule for all stages: what it may have torn is an error until it is cleared."""

    def backward(module: nn.Module, x: Tensor, fails: bool = False) -> None:
        module.fails = fails
        if not fails:
            module(x).sum().backward()
            return
        with pytest.raises(Oops):
            module(x).sum().backward()

    module = seeded(Failing)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    onefold.shard(module, optimizer, stage=stage)
    backward(module, X, fails=True)  # the first of a step: nothing is lost
    module(X)
    assert all(p.grad is None for p in module.parameters())
    if accumulates:
        with onefold.accumulate(module):
            backward(module, X)
    else:
        backward(module, X)
    backward(module, X, fails=True)
    with pytest.raises(onefold.StateError, match=r"the gradient of 'blocks[^$]*failed backward"):
        optimizer.step()
    for p in module.parameters():
        with pytest.raises(onefold.StateError, match="failed backward"):
            p.grad.norm()
    optimizer.zero_grad()
    backward(module, X)
    plain = seeded(Failing)
    backward(plain, X)
    for p, q in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(p.grad), q.grad)
    optimizer.step()


@worlds_in_turn
@pytest.mark.parametrize("fails", ["between blocks", "at the end"])
@pytest.mark.parametrize(("world_size", "stage"), [(1, 0), *ROWS])
@every_rank()
def test_gradients_that_are_assigned_after_a_failed_backward_stay(rank, world_size, stage, fails):
    def script(module: nn.Module) -> None:
        module.fails = fails == "between blocks"
        x = X.clone().requires_grad_()
        x.register_hook(_raise)
        with pytest.raises(Oops):
            module(x).sum().backward()
        module.fails = False
        for p in module.parameters():
            p.grad = torch.full_like(p, 0.5)
        module(X).sum().backward()

    module, plain = seeded(Failing), seeded(Failing)
    onefold.shard(module, torch.optim.SGD(module.parameters(), lr=0.1), stage=stage)
    script(module)
    script(plain)
    for p, q in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(p.grad), q.grad)


def test_the_first_forward_may_run_under_torch_func():
    def losses(module: nn.Module) -> list[Tensor]:
        batch = torch.arange(12.0).reshape(4, 3)
        return [
            torch.vmap(module)(batch.unsqueeze(1)).flatten(),
            torch.func.grad(lambda x: module(x).sum())(batch),
        ]

    wanted = losses(seeded(Failing))

    def body(rank: int) -> None:
        for stage in (0, 1, 3):
            found = losses(onefold.shard(seeded(Failing), stage=stage))
            for mine, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(mine, other)

    run_ranks(3, body)


@worlds_in_turn
@rows
def test_autograd_grad_has_this_ranks_gradients_of_whole_parameters(world_size, stage):
    """As DDP: nobody averages them, and `.grad` stays as it was."""
    plain = seeded(Failing)

    def body(rank: int) -> None:
        module = onefold.shard(seeded(Failing), stage=stage)
        own = X[rank : rank + 1]
        found = torch.autograd.grad(module(own).square().sum(), list(module.parameters()))
        wanted = torch.autograd.grad(plain(own).square().sum(), list(plain.parameters()))
        for mine, other in zip(found, wanted, strict=True):
            assert not isinstance(mine, DTensor)
            torch.testing.assert_close(mine, other)
        assert all(p.grad is None for p in module.parameters())

    run_ranks(world_size, body)


@worlds_in_turn
@rows
def test_gradients_stay_after_a_step_and_are_cleared_by_a_load(world_size, stage, tmp_path):
    plain = seeded(Mixed)
    for _ in range(2):
        plain(X).sum().backward()

    def body(rank: int) -> None:
        module = onefold.shard(seeded(Mixed), stage=stage)
        optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.0)
        for _ in range(2):
            module(X).sum().backward()
            optimizer.step()
        torch.testing.assert_close(whole(module.many.grad), plain.many.grad)
        onefold.save(tmp_path / "saved", module, optimizer)
        onefold.load(tmp_path / "saved", module, optimizer)
        assert all(p.grad is None for p in module.parameters())

    run_ranks(world_size, body)


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "unique": lambda p: p.unique(),
    "tolist": lambda p: p.tolist(),
}


@pytest.mark.parametrize("read", REFUSED)
@every_rank(3)
def test_a_read_that_dtensor_refuses_on_uneven_rows_names_the_parameter(rank, read):
    module, _ = sharded(3)
    wanted = rf"the rows of parameter 'many' on rank {rank}[^$]*hint: [^$]*full_tensor"
    with torch.no_grad(), pytest.raises(onefold.StateError, match=wanted):
        REFUSED[read](module.many)
    REFUSED[read](module.many.full_tensor())


@pytest.mark.parametrize(
    ("world_size", "stage", "wanted"), [(2, 0, 1), (3, 1, 1), (2, 2, 3), (3, 3, 3)]
)
@every_rank()
def test_hooks_run_whenever_a_mean_is_there_once_a_step_or_for_each_micro_batch(
    rank, world_size, stage, wanted
):
    module, _ = sharded(stage)
    calls: list[Tensor] = []
    module.many.register_post_accumulate_grad_hook(calls.append)
    for _ in range(2):
        with onefold.accumulate(module):
            module(X).sum().backward()
    module(X).sum().backward()
    assert len(calls) == wanted


class Normed(Failing):
    def __init__(self) -> None:
        super().__init__()
        _normed(self)


class Tied(Failing):
    def __init__(self) -> None:
        super().__init__()
        _tied(self)


def _normed(module: Failing) -> None:
    nn.utils.parametrizations.spectral_norm(module.blocks[0])


def _tied(module: Failing) -> None:
    module.blocks[0].weight = module.blocks[1].weight


@worlds_in_turn
@pytest.mark.parametrize(("kind", "change"), [(Normed, _normed), (Tied, _tied)])
@pytest.mark.parametrize(("world_size", "stage"), [(2, 1), (3, 3)])
def test_a_module_is_normed_and_tied_before_it_is_sharded(kind, change, world_size, stage):
    plain = seeded(kind).eval()
    wanted = plain(X)

    def body(rank: int) -> None:
        before, after = seeded(kind).eval(), seeded(Failing)
        onefold.shard(before, stage=stage)
        torch.testing.assert_close(before(X), wanted)
        onefold.shard(after, stage=stage)
        with pytest.raises(RuntimeError, match=r"'blocks.0.weight'|sharding strategy"):
            change(after)
            after(X)

    run_ranks(world_size, body)


@worlds_in_turn
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (2, 0), (2, 1), (3, 3)])
@every_rank()
def test_an_edit_in_a_block_that_is_computed_again_is_made_twice(
    rank, world_size, stage, reentrant
):
    """As in one process: by the forward, and where backward computes the block again."""

    class Halved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self._block, self.first(x), use_reentrant=reentrant)

        def _block(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.inner.weight.mul_(0.5)
            return F.linear(x, self.inner.weight).tanh()

    def train(module: nn.Module) -> list[float]:
        out = module(torch.linspace(-1, 1, 32).view(4, 8))
        out.square().mean().backward()
        read = (out, module.inner.weight, module.first.weight.grad, module.inner.weight.grad)
        return [tensor.detach().norm().item() for tensor in read]

    alone, module = seeded(Halved), seeded(Halved)
    onefold.shard(module, stage=stage, units=lambda part: isinstance(part, nn.Linear))
    assert train(module) == pytest.approx(train(alone), rel=1e-6)


class Averaging(nn.Module):
    """A teacher that follows its student, by an edit inside the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(3, 5).requires_grad_(False)
        self.student = nn.Linear(3, 5)
        self.edit: Callable[[Any, Any], object] = lambda t, s: None

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for t, s in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                self.edit(t, s)
        return self.student(x) - self.teacher(x).detach()


def in_statements(t: Any, s: Any) -> None:
    edited = t.mul_(0.9)
    edited += 0.1 * s
    t.div_(2)


IN_A_ROW: dict[str, Callable[[Any, Any], object]] = {
    "methods": lambda t, s: t.mul_(0.9).add_(s, alpha=0.1).clamp_(max=0.2).pow_(2),
    "statements": in_statements,
    "out": lambda t, s: torch.mul(t, 0.9, out=t).add_(0.1),
    "a function": lambda t, s: F.relu(t, inplace=True).add_(s),
    "of what trains": lambda t, s: s.clamp_(-0.2, 0.2).mul_(2),
}


@worlds_in_turn
@pytest.mark.parametrize("edit", IN_A_ROW.values(), ids=IN_A_ROW)
@rows
def test_edits_in_a_row_inside_a_forward_all_reach_the_parameter(edit, world_size, stage):
    def body(rank: int, *, is_sharded: bool = True) -> dict[str, Tensor]:
        module = seeded(Averaging)
        module.edit = edit
        if is_sharded:
            onefold.shard(module, stage=stage)
        optimizer = torch.optim.SGD(module.student.parameters(), lr=0.1)
        for _ in range(2):
            module(X).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: whole(p).detach().clone() for name, p in module.named_parameters()}

    wanted = body(0, is_sharded=False)
    for got in run_ranks(world_size, body):
        for name, value in wanted.items():
            torch.testing.assert_close(got[name], value, msg=name)
