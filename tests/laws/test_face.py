"""Law 2: a sharded module shows the names, shapes, dtypes and values of the module it was."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F
from torch.optim import optimizer as torch_optimizer
from torch.utils import _foreach_utils

import onefold
from onefold.config import Offload
from tests.support.programs.blocks import Residual, Tower
from tests.support.ranks import every_rank, run_ranks, seeded
from tests.support.rows import again_but, worlds_in_turn
from tests.support.zoo import (
    STAGES,
    WIDTH,
    Process,
    adamw,
    assert_close_notes,
    each_module,
    every_stage,
    law_1,
    rows,
    run_plain,
    run_sharded,
    squared,
    training,
    whole,
)

sharded_stages = pytest.mark.parametrize("stage", [1, 3])
some_worlds = pytest.mark.parametrize("world_size", [1, 2, 3])


class Faces(Tower):
    """Tied, frozen, scalar, empty and short parameters, a buffer, a look at itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].up.weight = self.blocks[0].up.weight
        self.blocks[0].down.weight.requires_grad_(False)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.row = nn.Parameter(torch.ones(1, WIDTH))
        self.unused = nn.Parameter(torch.ones(4))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.look: Callable[[str], None] = lambda moment: None

    def forward(self, x: Tensor) -> Tensor:
        self.look("forward starts")
        x = self.first(x) * self.row
        for block in self.blocks:
            x = block(x)
            self.look("between blocks")
            if x.requires_grad:
                x.register_hook(lambda grad: self.look("backward"))
        x = self.last(self.norm(x)) * self.gain
        self.look("forward ends")
        return x


def outline(module: nn.Module) -> list[Any]:
    """What law 2 promises of every parameter, under every name, in order."""
    described: list[Any] = [
        (name, tuple(p.shape), p.dtype, p.requires_grad, p.numel(), p.dim(), p.is_leaf,
         isinstance(p, nn.Parameter))
        for name, p in module.named_parameters(remove_duplicate=False)
    ]  # fmt: skip
    described.append(sum(p.numel() for p in module.parameters()))
    described.append([name for name, _ in module.named_parameters()])
    described.append([name for name, _ in module.named_buffers()])
    described.append([(n, tuple(v.shape), v.dtype) for n, v in module.state_dict().items()])
    return described


def in_ranks(world_size: int, body: Callable[[int], Any]) -> list[Any]:
    return run_ranks(world_size, body)


def one_step(module: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    squared(module)(batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def ready(build: Callable[[], nn.Module], stage: int, **options: Any) -> tuple[nn.Module, Any]:
    module = seeded(build)
    optimizer = adamw(module)
    onefold.shard(module, optimizer, stage=stage, **options)
    return module, optimizer


def values(module: nn.Module) -> dict[str, Tensor]:
    """Whole values of all parameters, a collective."""
    return {n: whole(p.detach()).clone() for n, p in module.named_parameters()}


def assert_values(module: nn.Module, wanted: dict[str, Tensor]) -> None:
    got = values(module)
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(got[name], value), name


# names, shapes, dtypes at every moment


@worlds_in_turn
@every_stage
@some_worlds
@pytest.mark.parametrize("units", [None, each_module], ids=["inferred", "fine"])
def test_names_shapes_dtypes_and_counts_are_the_modules_own_at_every_moment(
    world_size, stage, units
):
    plain = outline(seeded(Faces))

    def body(rank: int) -> set[str]:
        module, optimizer = ready(Faces, stage, units=units)
        seen: set[str] = set()

        def look(moment: str) -> None:
            assert outline(module) == plain, moment
            seen.add(moment)

        look("sharded")
        module.look = look
        for batch in rows():
            loss = squared(module)(batch)
            look("after forward")
            with onefold.accumulate(module):
                squared(module)(batch).backward()
                look("accumulated")
            loss.backward()
            look("after backward")
            optimizer.step()
            look("after step")
            optimizer.zero_grad()
            look("after zero_grad")
            with torch.no_grad():
                module(batch)
            look("after evaluation")
            with onefold.unsharded(module):
                look("unsharded")
            module.load_state_dict(module.state_dict())
            look("loaded")
        return seen

    for seen in in_ranks(world_size, body):
        assert {"forward starts", "between blocks", "backward", "forward ends"} <= seen


@worlds_in_turn
@every_stage
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_outside_forward_a_narrower_compute_dtype_does_not_show(stage, precision):
    plain = outline(seeded(Tower))

    def body(rank: int) -> None:
        module, optimizer = ready(Tower, stage, precision=precision)
        assert outline(module) == plain
        for batch in rows():
            loss = squared(module)(batch).float()
            assert outline(module) == plain
            loss.backward()
            assert outline(module) == plain
            for name, parameter in module.named_parameters():
                assert parameter.grad.dtype == torch.float32, name
            optimizer.step()
            assert outline(module) == plain
            optimizer.zero_grad()

    in_ranks(2, body)


@every_stage
@every_rank(3)
def test_a_parameter_is_one_object_between_steps(rank, stage):
    module, optimizer = ready(Tower, stage)
    before = {name: p for name, p in module.named_parameters()}
    for batch in rows():
        one_step(module, optimizer, batch)
        with onefold.unsharded(module):
            pass
        for name, parameter in module.named_parameters():
            assert parameter is before[name], name
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {
        id(p) for p in before.values()
    }
    assert len({*module.parameters()}) == len(before)


@every_stage
@every_rank(2)
def test_modules_and_parameters_print(rank, stage):
    module, optimizer = ready(Tower, stage)
    for _ in range(2):
        assert "Linear(in_features=8, out_features=7" in repr(module)
        for parameter in module.parameters():
            assert "tensor" in repr(parameter).lower()
            assert str(parameter)
        one_step(module, optimizer, rows()[0])


# DTensors


@again_but("2-3", "3-1")
@worlds_in_turn
@sharded_stages
@some_worlds
def test_sharded_parameters_and_gradients_are_dtensors_between_backward_and_forward(
    world_size, stage
):
    plain = seeded(Tower)
    optimizer_of_plain = adamw(plain)
    batch, other = rows()
    one_step(plain, optimizer_of_plain, other)
    squared(plain)(batch).backward()

    def body(rank: int) -> dict[str, int]:
        module, optimizer = ready(Tower, stage)
        local = {}

        def check(with_grad: bool) -> None:
            for name, parameter in module.named_parameters():
                for tensor in (parameter, parameter.grad) if with_grad else (parameter,):
                    assert isinstance(tensor, DTensor), name
                    assert tensor.placements == (Shard(0),), name
                    assert tensor.device_mesh.size() == world_size
                    assert tuple(tensor.shape) == tuple(plain.get_parameter(name).shape)
                    local[name] = tensor.to_local().shape[0]
                assert with_grad or parameter.grad is None

        check(with_grad=False)
        one_step(module, optimizer, other)
        check(with_grad=False)
        squared(module)(batch).backward()
        check(with_grad=True)
        for name, parameter in module.named_parameters():
            wanted = plain.get_parameter(name)
            torch.testing.assert_close(parameter.full_tensor().detach(), wanted.detach())
            torch.testing.assert_close(parameter.grad.full_tensor(), wanted.grad)
        optimizer.step()
        check(with_grad=True)
        optimizer.zero_grad()
        check(with_grad=False)
        return local

    counts = in_ranks(world_size, body)[0]
    for name, parameter in plain.named_parameters():
        assert counts[name] <= -(-parameter.shape[0] // world_size)


@sharded_stages
def test_the_rows_of_all_ranks_together_are_the_parameter(stage):
    def body(rank: int) -> dict[str, Tensor]:
        module, _ = ready(Faces, stage)
        return {name: p.to_local().detach().clone() for name, p in module.named_parameters()}

    pieces = in_ranks(3, body)
    for name, parameter in seeded(Faces).named_parameters():
        if parameter.dim():
            assert torch.equal(torch.cat([piece[name] for piece in pieces]), parameter), name


# the methods of DTensor where all rows are here: in one process and at stage 0

ALONE = 0  # ranks: no process group
WHOLE = [(ALONE, 3, None), (ALONE, 0, None), (ALONE, 3, "cpu"), (3, 0, None), (3, 1, None),
         (3, 3, None)]  # fmt: skip


def script_of_methods(module: Any, optimizer: Any, full: Any, part: Any, accumulate: Any) -> Any:
    """Whole parameters and gradients at many moments; `part` is this rank's of a batch."""
    moments: list[dict[str, Tensor]] = []

    def note() -> None:
        pairs = [(n, p) for n, p in module.named_parameters()]
        moments.append({n: full(p).detach() for n, p in pairs})
        moments.append({n: full(p.grad) for n, p in pairs if p.grad is not None})

    note()
    for batch in rows(2):
        with accumulate(module):
            (squared(module)(part(batch)) / 2).backward()
            note()
        (squared(module)(part(batch)) / 2).backward()
        note()
        optimizer.step()
        note()
        optimizer.zero_grad()
    squared(module)(part(rows(1)[0])).backward()
    optimizer.zero_grad(set_to_none=False)
    module.load_state_dict(module.state_dict())
    note()
    optimizer.zero_grad()
    penalty = sum(full(p).square().sum() for p in module.parameters())
    penalty.backward()
    note()
    return moments


@worlds_in_turn
@pytest.mark.parametrize(("world_size", "stage", "offload"), WHOLE)
def test_full_tensor_and_to_local_exist_at_every_stage_and_in_one_process(
    world_size, stage, offload
):
    plain = seeded(Tower)
    wanted = script_of_methods(
        plain, adamw(plain), Tensor.clone, lambda batch: batch, lambda module: nullcontext()
    )
    has_all = world_size == ALONE or stage == 0

    def body(rank: int) -> Any:
        def full(tensor: Any) -> Tensor:
            found, own = tensor.full_tensor(), tensor.to_local()
            assert (type(found), type(own)) == (Tensor, Tensor)
            assert own.shape == found.shape or not has_all
            return found

        module, optimizer = ready(Tower, stage, offload=offload)
        part = lambda batch: batch.chunk(max(1, world_size))[rank]
        return script_of_methods(module, optimizer, full, part, onefold.accumulate)

    for found in [body(0)] if world_size == ALONE else in_ranks(world_size, body):
        for index, (a, b) in enumerate(zip(found, wanted, strict=True)):
            assert a.keys() == b.keys(), index
            torch.testing.assert_close(a, b, msg=lambda text, index=index: f"{index}: {text}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_of_all_rows_stays_and_an_edit_of_own_rows_is_kept_in_one_process(dtype):
    module, optimizer = ready(lambda: nn.Linear(4, 4).to(dtype), 3)
    weight: Any = module.weight
    kept = weight.full_tensor().detach()
    before = kept.clone()
    with torch.no_grad():
        weight.to_local().add_(1)
    assert torch.equal(kept, before)
    one_step(module, optimizer, torch.zeros(2, 4, dtype=dtype))  # no gradient: weights decay
    plain = nn.Parameter(before + 1)
    plain.grad = torch.zeros_like(plain)
    adamw(nn.ParameterList([plain])).step()
    torch.testing.assert_close(weight.full_tensor(), plain)


def test_gradients_flow_through_own_rows_in_one_process():
    module, _ = ready(lambda: nn.Linear(4, 4), 3)
    weight: Any = module.weight
    weight.to_local().square().sum().backward()
    assert torch.equal(weight.grad.to_local(), 2 * weight.to_local())
    with torch.no_grad():
        assert not weight.to_local().requires_grad


def test_gradients_with_the_methods_are_plain_in_text_files_and_lists():
    module, _ = ready(Tower, 3)
    squared(module)(rows()[0]).backward()
    grad: Any = module.first.weight.grad
    plain = grad.to_local()
    assert (repr(grad), f"{grad[0, 0]:.3f}") == (repr(plain), f"{plain[0, 0]:.3f}")
    assert torch.equal(copy.deepcopy(grad).full_tensor(), plain)
    torch.save(grad, file := io.BytesIO())
    file.seek(0)
    assert type(torch.load(file, weights_only=True)) is Tensor
    assert type(pickle.loads(pickle.dumps(grad))) is Tensor
    assert type(grad * 2) is Tensor


@pytest.mark.parametrize(("world_size", "stage"), [(ALONE, 3), (3, 0)])
def test_torch_steps_and_clips_tensors_with_all_rows_by_lists(monkeypatch, world_size, stage):
    """torch takes its foreach and fused kernels for the classes that it knows alone.

    At stage 0 optimizers step flat tensors, not these parameters.
    """
    for place in (torch_optimizer, _foreach_utils):
        monkeypatch.setattr(place, "_get_foreach_kernels_supported_devices", lambda: ["cpu"])

    def body(rank: int) -> None:
        module = onefold.shard(seeded(nn.Linear, 4, 4), stage=stage)
        squared(module)(torch.ones(2, 4)).backward()
        choose = partial(torch_optimizer._default_to_fused_or_foreach, differentiable=False)
        parameters = list(module.parameters())
        if world_size == ALONE:
            assert choose(parameters) == (False, True)
            assert choose(parameters, use_fused=True) == (True, False)
        grads = [p.grad for p in parameters]
        assert _foreach_utils._has_foreach_support(grads, torch.device("cpu"))
        torch.optim.AdamW(parameters, fused=True).step()  # the user's own

    [body(0)] if world_size == ALONE else in_ranks(world_size, body)


READS: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda p: p.sum(),
    "mean": lambda p: p.mean(),
    "mean of rows": lambda p: p.mean(0),
    "norm": lambda p: p.norm(),
    "linalg norm": lambda p: torch.linalg.vector_norm(p, 1),
    "max": lambda p: p.abs().max(),
    "min": lambda p: p.min(),
    "power": lambda p: p.pow(2).sum(),
    "std": lambda p: p.std(),
    "var": lambda p: p.var(),
    "isnan": lambda p: p.isnan().any().float(),
    "clone": lambda p: p.clone(),
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "float": lambda p: p.float(),
    "double": lambda p: p.double(),
    "to": lambda p: p.to(torch.bfloat16),
    "cpu": lambda p: p.cpu(),
    "first row": lambda p: p[0],
    "last row": lambda p: p[-1],
    "rows": lambda p: p[2:5],
    "flat": lambda p: p.flatten(),
    "view": lambda p: p.view(-1),
    "reshape": lambda p: p.reshape(-1),
    "transpose": lambda p: p.t(),
    "T": lambda p: p.T,
    "plus": lambda p: p + 1,
    "negative": lambda p: -p,
    "times itself": lambda p: p * p,
    "matmul": lambda p: p.t() @ p,
    "linear": lambda p: F.linear(torch.ones(2, p.shape[1]), p),
    "histogram of signs": lambda p: (p > 0).sum().float(),
    "item": lambda p: torch.tensor(p.sum().item()),
    "list": lambda p: torch.tensor(p.tolist()),
    "numpy": lambda p: torch.from_numpy(p.detach().numpy().copy()),
    "argmax": lambda p: p.argmax(),
    "cat": lambda p: torch.cat([p, p]),
    "stack": lambda p: torch.stack([p, p]),
    "equal": lambda p: torch.tensor(float(torch.equal(p, p.clone()))),
    "chunks": lambda p: p.chunk(2)[1],
    "sorted": lambda p: p.flatten().sort().values,
    "unique": lambda p: torch.tensor(float(len(p.unique()))),
    "iteration": lambda p: sum(row.sum() for row in p),
    "median": lambda p: p.median(),
    "quantile": lambda p: p.flatten().quantile(0.5),
    "singular values": lambda p: torch.linalg.svdvals(p),
}


@again_but("grad-3")
@worlds_in_turn
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_whatever_is_read_of_a_parameter_is_right_or_an_error(stage, grad):
    """7 rows over 3 ranks: no rank has as many as another."""
    plain = seeded(Tower).blocks[0].up.weight.detach()

    def body(rank: int) -> set[str]:
        module, _ = ready(Tower, stage)
        refused = set()
        for name, func in READS.items():
            with nullcontext() if grad else torch.no_grad():
                try:
                    got = func(module.blocks[0].up.weight)
                except (onefold.OnefoldError, RuntimeError, NotImplementedError, TypeError):
                    refused.add(name)  # as torch's own DTensor does; it must not be wrong
                    continue
                got = whole(got).detach()
            torch.testing.assert_close(
                got, func(plain), check_stride=False, msg=lambda text, name=name: f"{name}: {text}"
            )
        return refused

    for refused in in_ranks(3, body):
        assert len(refused) < len(READS) / 3, refused


LOGGED: dict[str, Callable[[nn.Module], float]] = {
    "norm": lambda m: m.first.weight.grad.norm().item(),
    "sum": lambda m: float(m.last.bias.grad.sum()),
    "mean": lambda m: m.last.bias.grad.mean().item(),
    "largest": lambda m: max(p.grad.abs().max().item() for p in m.parameters()),
    "square": lambda m: sum(p.grad.pow(2).sum().item() for p in m.parameters()) ** 0.5,
    "total norm": lambda m: torch.nn.utils.get_total_norm([p.grad for p in m.parameters()]).item(),
    "printed": lambda m: float(f"{torch.nn.utils.clip_grad_norm_(m.parameters(), 1e9):.8f}"),
    "compared": lambda m: float(torch.nn.utils.clip_grad_norm_(m.parameters(), 1e9) > 0.001),
    "close": lambda m: float(torch.allclose(m.last.bias.grad.sum(), m.last.bias.grad.sum() * 1)),
    "close to a copy": lambda m: float(
        torch.allclose(m.first.weight.grad, m.first.weight.grad.clone())
    ),
    "stacked": lambda m: torch.stack([p.grad.norm() for p in m.parameters()]).norm().item(),
    "list of norms": lambda m: torch.tensor([p.grad.norm() for p in m.parameters()]).norm().item(),
}


@again_but("3")
@every_stage
def test_what_a_plain_script_logs_of_gradients_is_right(stage):
    plain = seeded(Tower)
    squared(plain)(rows()[0]).backward()

    def body(rank: int) -> None:
        module, _ = ready(Tower, stage)
        squared(module)(rows()[0]).backward()
        for name, log in LOGGED.items():
            assert log(module) == pytest.approx(log(plain), rel=1e-5), name

    in_ranks(3, body)


@again_but("3")
@every_stage
def test_parameters_read_right_after_every_kind_of_event(stage):
    """At stages 1 and 2 whole weights are kept after forward; they must not be stale."""

    def script(process: Process) -> None:
        module, optimizer = process.ready(Tower)

        def note(moment: str) -> None:
            with torch.no_grad():
                process.note(
                    f"{moment}: norm", torch.stack([whole(p.norm()) for p in module.parameters()])
                )

        for index, batch in enumerate(rows()):
            note(f"{index} before")
            loss = process.mean(squared(module), batch)
            note(f"{index} forward")
            loss.backward()
            note(f"{index} backward")
            optimizer.step()
            note(f"{index} step")
            with torch.no_grad():
                process.note_mean(f"{index} eval loss", process.mean(squared(module), batch))
            note(f"{index} eval")
            optimizer.zero_grad()

    law_1(3, script, stages=(stage,), fine_units=stage == 3, relative=2e-6)


# state dicts


@worlds_in_turn
@every_stage
@some_worlds
def test_a_state_dict_has_the_modules_names_and_values(world_size, stage):
    plain = seeded(Faces).state_dict()

    def body(rank: int) -> None:
        module, optimizer = ready(Faces, stage)
        state = module.state_dict()
        assert list(state) == list(plain)
        for name, value in plain.items():
            assert torch.equal(whole(state[name]), value), name
        prefixed = module.state_dict(prefix="model.")
        assert list(prefixed) == [f"model.{name}" for name in plain]
        one_step(module, optimizer, rows()[0])
        with onefold.unsharded(module):
            stepped = {name: value.clone() for name, value in module.state_dict().items()}
        for name, value in module.state_dict().items():
            assert torch.equal(whole(value), stepped[name]), name
        assert not torch.equal(stepped["first.weight"], plain["first.weight"])

    in_ranks(world_size, body)


@again_but("plain-2-3", "plain-3-1", "sharded-1-1", "own-1-3")
@worlds_in_turn
@every_stage
@some_worlds
@pytest.mark.parametrize("kind", ["plain", "sharded", "own"])
def test_loaded_state_is_what_training_goes_on_with(world_size, stage, kind):
    """Also right after a forward, when stages 1 and 2 hold gathered weights."""
    source = seeded(Tower, seed=5)

    def script(process: Process) -> None:
        module, optimizer = process.ready(Tower)
        process.step(0, module, optimizer, squared(module), rows()[0])
        with torch.no_grad():
            module(rows()[0])
        if kind == "own":
            state = {name: value.clone() for name, value in module.state_dict().items()}
            process.step("lost", module, optimizer, squared(module), rows()[1])
            if process.is_plain:
                state = {name: value for name, value in state.items()}
        elif kind == "plain" or process.is_plain:
            state = source.state_dict()
        else:
            other = copy.deepcopy(source)
            onefold.shard(other, stage=3)
            state = other.state_dict()
        keys = module.load_state_dict(state)
        assert not keys.missing_keys
        assert not keys.unexpected_keys
        process.note_weights(module, "loaded")
        process.step(1, module, optimizer, squared(module), rows()[1])
        process.note_weights(module)

    law_1(world_size, script, stages=(stage,), fine_units=False)


@every_stage
def test_masters_follow_loaded_state_under_mixed_precision(stage):
    source = seeded(partial(nn.Linear, WIDTH, 5, dtype=torch.bfloat16), seed=5)

    def body(rank: int) -> None:
        module = seeded(partial(nn.Linear, WIDTH, 5, dtype=torch.bfloat16))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
        onefold.shard(module, optimizer, stage=stage)
        for _ in range(2):
            module(torch.ones(2, WIDTH, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            module.load_state_dict(source.state_dict())
        module(torch.ones(2, WIDTH, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        for name, value in source.state_dict().items():
            assert torch.equal(whole(module.state_dict()[name]), value), name

    in_ranks(2, body)


@every_stage
def test_part_of_a_state_can_be_loaded_when_not_strict(stage):
    source = seeded(Tower, seed=5).state_dict()
    part = {name: value for name, value in source.items() if name.startswith("blocks.0")}

    def body(rank: int) -> None:
        module, _ = ready(Tower, stage)
        before = values(module)
        keys = module.load_state_dict({**part, "stranger": torch.ones(2)}, strict=False)
        assert keys.unexpected_keys == ["stranger"]
        assert set(keys.missing_keys) == set(source) - set(part)
        assert_values(module, {**before, **part})

    in_ranks(2, body)


class Legacy(nn.Module):
    """Loads an older file: three ways by which modules translate its names."""

    class Renamed(nn.Linear):
        def _load_from_state_dict(self, state, prefix, *others):
            if prefix + "w" in state:
                state[prefix + "weight"] = state.pop(prefix + "w")
            super()._load_from_state_dict(state, prefix, *others)

    def __init__(self):
        super().__init__()
        self.fused, self.renamed, self.norm = nn.Linear(8, 6), self.Renamed(6, 4), nn.BatchNorm1d(4)
        self.fused.register_load_state_dict_pre_hook(self.fuse)

    @staticmethod
    def fuse(module, state, prefix, *_):
        if prefix + "q" in state:
            parts = [state.pop(prefix + name) for name in "qkv"]
            state[prefix + "weight"] = torch.cat(parts)

    @staticmethod
    def older(state):
        state = dict(state)
        state["renamed.w"] = state.pop("renamed.weight")
        q, k, v = state.pop("fused.weight").chunk(3)
        state |= {"fused.q": q, "fused.k": k, "fused.v": v}
        del state["norm.num_batches_tracked"]  # a file without versions: it is a later buffer
        return state


@every_stage
def test_names_that_modules_translate_while_they_load_are_no_strangers(stage):
    wanted = seeded(Legacy, seed=5).state_dict()

    def body(rank: int) -> None:
        module = onefold.shard(seeded(Legacy), stage=stage)
        module.load_state_dict(Legacy.older(wanted))
        for name, value in wanted.items():
            assert torch.equal(whole(module.state_dict()[name]), value), name
        with pytest.raises(onefold.StateError, match=r"(?s)Missing key.*fused.bias.*hint: "):
            module.load_state_dict({n: v for n, v in wanted.items() if n != "fused.bias"})

    in_ranks(2, body)


class OfOldSignature(Tower):
    def load_state_dict(self, state_dict, strict=True):
        own = {name.removeprefix("module."): value for name, value in state_dict.items()}
        return super().load_state_dict(own, strict)


@every_stage
def test_an_override_of_load_state_dict_gets_the_arguments_of_the_caller(stage):
    wanted = seeded(OfOldSignature, seed=5).state_dict()
    wrapped = {f"module.{name}": value for name, value in wanted.items()}

    def body(rank: int) -> None:
        for load in (
            lambda module: module.load_state_dict(wrapped),
            lambda module: module.load_state_dict(wrapped, strict=True),
            lambda module: set_model_state_dict(
                module, dict(wanted), options=StateDictOptions(full_state_dict=True)
            ),
        ):
            module, _ = ready(OfOldSignature, stage)
            load(module)
            assert_values(module, wanted)

    in_ranks(2, body)


@every_stage
def test_a_submodule_saves_and_loads_its_own_state(stage):
    source = seeded(Tower, seed=5)

    def body(rank: int) -> None:
        module, optimizer = ready(Tower, stage)
        one_step(module, optimizer, rows()[0])
        before = values(module)
        state = module.blocks[1].state_dict()
        for name, value in state.items():
            assert torch.equal(whole(value), before[f"blocks.1.{name}"]), name
        module.blocks[1].load_state_dict(source.blocks[1].state_dict())
        wanted = {
            name: source.get_parameter(name).detach() if name.startswith("blocks.1") else value
            for name, value in before.items()
        }
        assert_values(module, wanted)

    in_ranks(2, body)


@again_but("2-3", "3-1")
@worlds_in_turn
@every_stage
@pytest.mark.parametrize("world_size", [2, 3])
def test_distributed_checkpoints_go_round_at_every_stage(world_size, stage, tmp_path):
    def save(rank: int) -> dict[str, Tensor]:
        module, optimizer = ready(Faces, stage)
        one_step(module, optimizer, rows()[0])
        dcp.save({"module": module.state_dict()}, checkpoint_id=tmp_path / "saved")
        return values(module)

    saved = in_ranks(world_size, save)[0]

    def load(rank: int) -> None:
        for stage_now in (0, 3):
            module = seeded(Faces, seed=7)
            onefold.shard(module, stage=stage_now)
            state = {"module": module.state_dict()}
            dcp.load(state, checkpoint_id=tmp_path / "saved")
            module.load_state_dict(state["module"])
            assert_values(module, saved)

    in_ranks(5 - world_size, load)


@again_but("3")
@every_stage
def test_torchs_checkpoint_helpers_see_a_whole_module_and_optimizer(stage):
    plain = seeded(Tower)
    plain_optimizer = adamw(plain)
    one_step(plain, plain_optimizer, rows()[0])
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    wanted = get_model_state_dict(plain, options=options)
    moments = get_optimizer_state_dict(plain, plain_optimizer, options=options)

    def body(rank: int) -> None:
        module, optimizer = ready(Tower, stage)
        one_step(module, optimizer, rows()[0])
        state = get_model_state_dict(module, options=options)
        mine = get_optimizer_state_dict(module, optimizer, options=options)
        if rank == 0:
            torch.testing.assert_close(state, wanted, rtol=1e-5, atol=1e-6)
            assert mine["state"].keys() == moments["state"].keys()
            for name, entry in moments["state"].items():
                torch.testing.assert_close(mine["state"][name], entry, rtol=1e-4, atol=1e-7)
        other, its_optimizer = ready(partial(Tower), stage)
        loading = StateDictOptions(full_state_dict=True)
        set_model_state_dict(other, copy.deepcopy(wanted), options=loading)
        set_optimizer_state_dict(other, its_optimizer, copy.deepcopy(moments), options=loading)
        set_model_state_dict(module, copy.deepcopy(wanted), options=loading)
        set_optimizer_state_dict(module, optimizer, copy.deepcopy(moments), options=loading)
        one_step(module, optimizer, rows()[1])
        one_step(other, its_optimizer, rows()[1])
        assert_values(other, values(module))

    in_ranks(2, body)


# what is gone stays gone


USES: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda p: p.sum(),
    "arithmetic": lambda p: p + 1,
    "right arithmetic": lambda p: 1 - p,
    "comparison": lambda p: p == 0,
    "matmul": lambda p: torch.ones(1, p.shape[0]) @ p,
    "linear": lambda p: F.linear(torch.ones(1, WIDTH), p),
    "clone": lambda p: p.clone(),
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "item": lambda p: p[0, 0].item(),
    "list": lambda p: p.tolist(),
    "numpy": lambda p: p.numpy(),
    "cat": lambda p: torch.cat([p, p]),
    "in place": lambda p: p.data.zero_(),
    "index": lambda p: p[0],
    "iteration": lambda p: list(p),
    "float": lambda p: p.double(),
    "norm": lambda p: torch.nn.utils.get_total_norm([p]),
    "optimizer": lambda p: torch.optim.SGD([p], lr=1.0),
    "backward": lambda p: p.sum().backward(),
    "out": lambda p: torch.add(torch.ones(()), 1, out=p),
    "pickle": lambda p: pickle.dumps(p),
    "deepcopy": lambda p: copy.deepcopy(p),
    "save": lambda p: torch.save(p, io.BytesIO()),
}


def refuses_every_use(parameter: Tensor) -> None:
    for name, use in USES.items():
        with torch.no_grad() if name == "in place" else nullcontext():
            try:
                use(parameter)
            except onefold.StateError as error:
                assert "'blocks.0.up.weight'" in str(error), name
                assert "\nhint: " in str(error), name
            else:
                pytest.fail(f"{name} is no error")


@sharded_stages
@every_rank(2)
def test_the_objects_that_were_parameters_before_are_errors_that_name_them(rank, stage):
    module = seeded(Tower)
    before = module.blocks[0].up.weight
    onefold.shard(module, adamw(module), stage=stage)
    refuses_every_use(before)


@every_rank(2)
def test_at_stage_0_the_objects_that_were_parameters_still_are(rank):
    module = seeded(Tower)
    before = dict(module.named_parameters())
    optimizer = adamw(module)
    onefold.shard(module, optimizer, stage=0)
    one_step(module, optimizer, rows()[0])
    for name, parameter in module.named_parameters():
        assert parameter is before[name]


@every_rank(2)
def test_whole_weights_kept_from_a_forward_are_errors_once_resharded(rank):
    module, _ = ready(Tower, 3)
    kept: list[Tensor] = []
    module.blocks[0].up.register_forward_pre_hook(lambda m, args: kept.append(m.weight))
    with torch.no_grad():
        module(rows()[0])
    refuses_every_use(kept[0])


@every_stage
@every_rank(2)
def test_whole_weights_kept_from_a_forward_are_never_stale(rank, stage):
    module, optimizer = ready(Tower, stage)
    kept: list[Tensor] = []
    module.blocks[0].up.register_forward_pre_hook(lambda m, args: kept.append(m.weight))
    for batch in rows():
        one_step(module, optimizer, batch)
        now = values(module)["blocks.0.up.weight"]
        for weight in kept:
            try:
                shown = whole(weight.detach())
            except onefold.StateError:
                continue
            assert torch.equal(shown, now)


# unsharded


@worlds_in_turn
@every_stage
@some_worlds
def test_unsharded_shows_whole_plain_parameters(world_size, stage):
    plain = seeded(Faces)

    def body(rank: int) -> None:
        module, optimizer = ready(Faces, stage)
        with onefold.unsharded(module):
            for name, parameter in module.named_parameters():
                assert type(parameter) is nn.Parameter, name
                assert torch.equal(parameter, plain.get_parameter(name)), name
            assert module.blocks[1].up.weight is module.blocks[0].up.weight
            with torch.no_grad():
                got = module.eval()(rows()[0])
            torch.testing.assert_close(got, copy.deepcopy(plain).eval()(rows()[0]))
            module.train()
        one_step(module, optimizer, rows()[0])
        after = values(module)
        with onefold.unsharded(module):
            for name, parameter in module.named_parameters():
                assert torch.equal(parameter, after[name]), name

    in_ranks(world_size, body)


def _copy(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.full_like(parameter, 0.5))


def _fill(module: nn.Module) -> None:
    for parameter in module.parameters():
        nn.init.constant_(parameter, 0.5)


def _data(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data.fill_(0.5)


def _assign_data(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = torch.full_like(parameter, 0.5)


def _replace(module: nn.Module) -> None:
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            setattr(part, name, nn.Parameter(torch.full_like(parameter, 0.5)))


def _load(module: nn.Module) -> None:
    module.load_state_dict({n: torch.full_like(v, 0.5) for n, v in module.state_dict().items()})


EDITS = {
    "copy_": _copy, "init": _fill, "data.fill_": _data, "data =": _assign_data,
    "another parameter": _replace, "load_state_dict": _load,
}  # fmt: skip


@again_but("1-data.fill_-3", "3-data =-0", "3-another parameter-1", "3-load_state_dict-3")
@worlds_in_turn
@every_stage
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("world_size", [1, 3])
@every_rank()
def test_edits_in_unsharded_are_kept_with_writeback_and_lost_without(rank, world_size, stage, edit):
    module, optimizer = ready(Tower, stage)
    one_step(module, optimizer, rows()[0])
    before = values(module)
    faces = dict(module.named_parameters())
    with onefold.unsharded(module):
        EDITS[edit](module)
    assert_values(module, before)
    with onefold.unsharded(module, writeback=True):
        EDITS[edit](module)
    edited = {name: torch.full_like(value, 0.5) for name, value in before.items()}
    assert_values(module, edited)
    for name, parameter in module.named_parameters():
        assert parameter is faces[name], name
    with torch.no_grad():
        got = module(torch.ones(1, WIDTH))
    other = seeded(Tower)
    _copy(other)
    torch.testing.assert_close(got, other(torch.ones(1, WIDTH)).detach())
    one_step(module, optimizer, rows()[1])


@again_but("fine")
@pytest.mark.parametrize("units", [None, each_module], ids=["inferred", "fine"])
def test_training_goes_on_from_edits_as_in_one_process(units):
    def script(process: Process) -> None:
        module, optimizer = process.ready(Faces)
        for index, batch in enumerate(rows(3)):
            process.step(index, module, optimizer, squared(module), batch)
            guard = nullcontext() if process.is_plain else onefold.unsharded(module, writeback=True)
            with guard, torch.no_grad():
                for parameter in module.parameters():
                    parameter.mul_(0.9)
        process.note_weights(module)

    def without_norms(process: Process) -> None:
        script(process)

    law_1(3, partial(_frozen_norm, without_norms), fine_units=units is not None)


def _frozen_norm(script: Callable[[Process], None], process: Process) -> None:
    """Batch statistics depend on the cut: compare with the norm in evaluation mode."""
    ready_before = process.ready

    def ready_now(build: Callable[[], nn.Module], *args: Any, **options: Any) -> Any:
        module, optimizer = ready_before(build, *args, **options)
        module.norm.eval()
        return module, optimizer

    process.ready = ready_now  # type: ignore[method-assign]
    script(process)


@worlds_in_turn
@every_stage
@pytest.mark.parametrize("writeback", [False, True])
@every_rank(2)
def test_after_an_exception_in_unsharded_the_module_trains_on(rank, stage, writeback):
    module, optimizer = ready(Tower, stage)
    before = values(module)
    with pytest.raises(ZeroDivisionError), onefold.unsharded(module, writeback=writeback):
        raise ZeroDivisionError
    assert_values(module, before)
    one_step(module, optimizer, rows()[0])
    for name, value in values(module).items():
        assert not torch.equal(value, before[name]), name


@every_stage
@every_rank(2)
def test_a_shape_changed_in_unsharded_is_an_error_that_leaves_the_module_usable(rank, stage):
    module, optimizer = ready(Tower, stage)
    before = values(module)
    with (
        pytest.raises(onefold.StateError, match=r"'blocks\.0\.up\.weight'.*\n*hint: "),
        onefold.unsharded(module, writeback=True),
    ):
        module.blocks[0].up.weight = nn.Parameter(torch.ones(2, 2))
    assert_values(module, before)
    one_step(module, optimizer, rows()[0])


@again_but("3")
@every_stage
def test_unsharded_nests_and_frees_what_it_gathered(stage):
    def body(rank: int) -> tuple[int, int]:
        module, optimizer = ready(Tower, stage)
        one_step(module, optimizer, rows()[0])
        before = values(module)
        held = onefold.report(module).total.now
        with onefold.unsharded(module), onefold.unsharded(module):
            assert type(module.first.weight) is nn.Parameter
        assert_values(module, before)
        gc.collect()
        return held, onefold.report(module).total.now

    for held, after in in_ranks(3, body):
        assert after <= held


@every_stage
@every_rank(2)
def test_a_module_runs_and_is_differentiated_in_unsharded(rank, stage):
    module, optimizer = ready(Tower, stage)
    with onefold.unsharded(module):
        loss = squared(module)(rows()[0])
        (slope,) = torch.autograd.grad(loss, module.first.weight)
        assert slope.abs().sum() > 0
    one_step(module, optimizer, rows()[0])


def _backwards_in_unsharded(process: Process) -> None:
    """With an earlier gradient or not, between micro-batches, cleared before or after; clipped."""
    module, optimizer = process.ready(Faces)
    module.norm.eval()

    def inside(writeback: bool = False) -> Any:
        return nullcontext() if process.is_plain else onefold.unsharded(module, writeback)

    def backward(batch: Tensor) -> None:
        process.mean(squared(module), batch).backward()

    for index, batch in enumerate(rows(4)):
        micro_batch = nullcontext() if process.is_plain else onefold.accumulate(module)
        if index == 1:
            backward(batch)
        elif index == 2:
            with micro_batch:
                backward(batch)
                with inside():
                    backward(2 * batch)
        with inside(writeback=index == 1):
            if index == 3:
                backward(batch)
                optimizer.zero_grad()
            backward(batch)
            backward(3 * batch)
            if index == 1:
                with torch.no_grad():
                    module.first.weight.mul_(0.9)
        if index == 2:
            backward(batch)
        process.note_grads(str(index), module)
        process.note(f"{index} norm", nn.utils.clip_grad_norm_(module.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad()
    process.note_weights(module)


@worlds_in_turn
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("offload", [None, "optimizer", "cpu"])
def test_a_backward_in_unsharded_adds_to_gradients_as_one_outside_does(world_size, offload):
    plain = run_plain(_backwards_in_unsharded, world_size)
    for stage in {None: STAGES, "optimizer": [1], "cpu": [3]}[offload]:
        got = run_sharded(_backwards_in_unsharded, world_size, stage, offload=offload)
        assert_close_notes(got, plain, 1e-6, f"stage {stage}")


@pytest.mark.parametrize("world_size", [1, 2])
def test_hooks_of_gradients_run_after_unsharded(world_size):
    def body(rank: int) -> None:
        module, _ = ready(Tower, 1)
        seen: list[nn.Parameter] = []
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.mul_(0)))
        with onefold.unsharded(module):
            squared(module)(rows()[0]).backward()
            assert not seen
        assert len(seen) == len(list(module.parameters()))
        assert all(not whole(parameter.grad).any() for parameter in module.parameters())

    in_ranks(world_size, body)
    if world_size == 1:
        body(0)  # without a process group autograd has these hooks


@worlds_in_turn
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("is_earlier", [False, True])
@every_rank(2)
def test_gradients_of_a_block_that_failed_are_not_stepped(rank, stage, is_earlier):
    module, optimizer = ready(Tower, stage)
    loss = squared(module)
    if is_earlier:
        loss(rows()[0]).backward()
    with pytest.raises(ZeroDivisionError), onefold.unsharded(module):
        loss(rows()[0]).backward()
        raise ZeroDivisionError
    with pytest.raises(onefold.StateError, match=r"first.*whole backwards(.*\n)*hint: "):
        optimizer.step()
    optimizer.zero_grad()
    one_step(module, optimizer, rows()[0])


@pytest.mark.parametrize("world_size", [1, 2])
@every_rank()
def test_half_a_backward_in_unsharded_is_an_error(rank, world_size):
    module, optimizer = ready(Tower, 3, offload=Offload("cpu", "cpu"))
    loss = squared(module)
    with onefold.unsharded(module):
        output = loss(rows()[0])
    with pytest.raises(onefold.StateError, match=r"after the block(.*\n)*hint: "):
        output.backward()
    if world_size > 1:  # else the weights that the graph needs are there
        output = loss(rows()[0])
        wanted = pytest.raises(onefold.StateError, match=r"inside the block(.*\n)*hint: ")
        with wanted, onefold.unsharded(module):
            output.backward()
    wanted = pytest.raises(onefold.StateError, match=r"after onefold.unsharded(.*\n)*hint: ")
    with wanted, onefold.unsharded(module):
        loss(rows()[0]).backward()
        optimizer.step()
    optimizer.zero_grad()
    one_step(module, optimizer, rows()[0])


@every_stage
@every_rank(2)
def test_a_container_without_modules_keeps_edits_of_its_own_parameter(rank, stage):
    """Its length is 0, so it is false where a test for None is meant."""

    class Scale(nn.Sequential):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return x * self.scale

    module = nn.Sequential(Scale(), nn.Linear(3, 3))
    onefold.shard(module, stage=stage)
    with onefold.unsharded(module, writeback=True):
        module[0].scale.data.mul_(2.0)
    with onefold.unsharded(module):
        assert torch.equal(module[0].scale, torch.full((3,), 2.0))


@every_stage
@every_rank(2)
def test_unsharded_inside_forward_is_an_error(rank, stage):
    class Peeking(Tower):
        def forward(self, x):
            with onefold.unsharded(self):
                return super().forward(x)

    module, _ = ready(Peeking, stage)
    with pytest.raises(onefold.StateError, match=f"rank {rank}.*\n*hint: "):
        module(rows()[0])


# copying, meta, report


@worlds_in_turn
@every_stage
@pytest.mark.parametrize(
    "copier",
    [copy.deepcopy, pickle.dumps, lambda m: torch.save(m, io.BytesIO())],
    ids=["deepcopy", "pickle", "save"],
)
@every_rank(2)
def test_a_sharded_module_is_not_copied_by_accident(rank, stage, copier):
    module, optimizer = ready(Tower, stage)
    before = values(module)
    with pytest.raises(onefold.StateError, match="hint: "):
        copier(module)
    assert_values(module, before)
    one_step(module, optimizer, rows()[0])


@every_stage
@every_rank(2)
def test_a_copied_state_dict_is_a_snapshot(rank, stage):
    module, optimizer = ready(Tower, stage)
    before = values(module)
    kept = copy.deepcopy(module.state_dict())
    one_step(module, optimizer, rows()[0])
    for name, value in kept.items():
        assert torch.equal(whole(value), before[name]), name
    module.load_state_dict(kept)
    assert_values(module, before)


@every_stage
@pytest.mark.filterwarnings("ignore:torch.save of a sharded module")
@every_rank(2)
def test_a_state_dict_survives_torch_save(rank, stage):
    module, optimizer = ready(Tower, stage)
    before = values(module)
    file = io.BytesIO()
    torch.save({"module": module.state_dict(), "optimizer": optimizer.state_dict()}, file)
    one_step(module, optimizer, rows()[0])
    file.seek(0)
    module.load_state_dict(torch.load(file, weights_only=False)["module"])
    assert_values(module, before)


class Counting(nn.Module):
    """Initial values that depend on nothing but the shape."""

    def __init__(self, numel: int, device: str | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(numel, 3, device=device))
        self.scale = nn.Parameter(torch.empty((), device=device))
        self.register_buffer("seen", torch.empty(2, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            if not self.weight.is_meta:
                self.weight.copy_(torch.arange(self.weight.numel()).view_as(self.weight) / 7)
            self.scale.fill_(0.25)
            self.seen.fill_(2.0)

    def forward(self, x: Tensor) -> Tensor:
        return x + x @ self.weight.t() @ self.weight * self.scale + self.seen.sum()


def counted(device: str | None = None, tied: bool = False) -> nn.Module:
    net = nn.Sequential(*(Counting(numel, device) for numel in (5, 1, 4)))
    if tied:
        net.append(Counting(5, device))
        net[3].weight = net[0].weight
    return net


@worlds_in_turn
@every_stage
@some_worlds
@pytest.mark.parametrize("units", [None, each_module], ids=["inferred", "fine"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_module_built_on_meta_has_the_values_of_one_built_whole(world_size, stage, units, tied):
    plain = counted(tied=tied)
    wanted = {name: p.detach() for name, p in plain.named_parameters()}

    def body(rank: int) -> None:
        module = counted("meta", tied)
        optimizer = adamw(module)
        onefold.shard(module, optimizer, stage=stage, units=units)
        assert_values(module, wanted)
        assert all(torch.equal(buffer, torch.full((2,), 2.0)) for buffer in module.buffers())
        assert outline(module) == outline(plain)
        batch = torch.ones(2, 3) / 9
        module(batch).mean().backward()
        optimizer.step()
        with onefold.unsharded(module):
            for name, parameter in module.named_parameters():
                assert parameter.isfinite().all(), name
                assert not torch.equal(parameter, wanted[name]), name

    in_ranks(world_size, body)


def test_a_module_built_on_meta_has_the_same_random_values_at_every_stage():
    def built(stage: int) -> dict[str, Tensor]:
        with torch.device("meta"):
            module = nn.Sequential(
                nn.Embedding(9, WIDTH, padding_idx=0), Tower(), nn.LayerNorm(3), nn.Conv1d(3, 5, 1),
                nn.BatchNorm1d(5), nn.GRU(5, 2), nn.Bilinear(2, 3, 4),
            )  # fmt: skip
        torch.manual_seed(0)
        onefold.shard(module, stage=stage)
        return values(module)

    runs = [run_ranks(1, lambda rank, stage=stage: built(stage))[0] for stage in STAGES]
    for run in runs:
        for name, value in runs[0].items():
            assert value.isfinite().all(), name
            assert torch.equal(run[name], value), name


@pytest.mark.parametrize("world_size", [1, 2])
@every_rank()
def test_a_meta_module_without_reset_parameters_is_a_config_error_that_names_it(rank, world_size):
    class Unresettable(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3, 3, device="meta"))

    module = nn.Sequential(nn.Linear(3, 3, device="meta"), Unresettable())
    with pytest.raises(onefold.ConfigError, match=r"Unresettable(.|\n)*hint: "):
        onefold.shard(module)


@every_rank(2)
def test_a_meta_module_whose_reset_leaves_something_out_is_a_config_error_that_names_it(rank):
    class Forgetful(nn.Linear):
        def __init__(self):
            super().__init__(3, 3, device="meta")
            self.forgotten = nn.Parameter(torch.empty(4, device="meta"))

    with pytest.raises(onefold.ConfigError, match=r"forgotten(.|\n)*hint: "):
        onefold.shard(nn.Sequential(Forgetful()))


@every_stage
def test_ranks_that_built_other_values_train_on_those_of_rank_0(stage):
    def body(rank: int) -> dict[str, Tensor]:
        module = seeded(Faces, seed=rank)
        module.norm.running_mean.fill_(rank)
        onefold.shard(module, stage=stage)
        assert not module.norm.running_mean.any()
        return values(module)

    wanted = seeded(Faces, seed=0)
    for got in in_ranks(3, body):
        for name, value in got.items():
            assert torch.equal(value, wanted.get_parameter(name)), name


@every_stage
def test_a_report_prints_and_is_not_a_collective(stage):
    def body(rank: int) -> str:
        module, optimizer = ready(Tower, stage)
        one_step(module, optimizer, rows()[0])
        text = "\n".join(str(onefold.report(module)) for _ in range(rank * 2 + 1))
        one_step(module, optimizer, rows()[1])
        return text

    for rank, text in enumerate(in_ranks(2, body)):
        assert f"stage {stage}, rank {rank} of 2, 1 steps" in text
        assert "weight" in text
        assert "optimizer" in text


@every_stage
def test_gradients_are_none_until_backward_and_after_zero_grad(stage):
    script = training(Tower)
    assert run_plain(script).keys() == run_sharded(script, 2, stage).keys()

    def body(rank: int) -> None:
        module, optimizer = ready(Tower, stage)
        for _ in range(2):
            assert all(p.grad is None for p in module.parameters())
            squared(module)(rows()[0]).backward()
            assert all(p.grad is not None for p in module.parameters())
            optimizer.step()
            optimizer.zero_grad()

    in_ranks(2, body)


@every_stage
@every_rank(2)
def test_hooks_of_parameters_see_the_reduced_gradient_once_per_backward(rank, stage):
    module, _ = ready(Tower, stage)
    seen: list[tuple[str, Tensor]] = []
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: seen.append((name, p.grad))
        )
    squared(module)(rows()[0] * (rank + 1)).backward()
    assert sorted(name for name, _ in seen) == sorted(n for n, _ in module.named_parameters())
    for name, grad in seen:
        assert torch.equal(whole(grad), whole(module.get_parameter(name).grad)), name


@every_stage
@every_rank(2)
def test_a_tensor_hook_on_a_parameter_is_not_silently_ignored(rank, stage):
    """Autograd never meets a sharded parameter, so a hook that would not run is refused."""
    module, _ = ready(Tower, stage)
    seen: list[Tensor] = []
    try:
        module.first.weight.register_hook(seen.append)
    except onefold.StateError as error:
        assert "'first.weight'" in str(error)
        return
    squared(module)(rows()[0]).backward()
    assert len(seen) == 1


@every_stage
@every_rank(2)
def test_a_residual_block_is_still_its_class(rank, stage):
    module = seeded(Tower)
    same = onefold.shard(module, stage=stage)
    assert same is module
    assert type(module) is Tower
    assert type(module.blocks[0]) is Residual
