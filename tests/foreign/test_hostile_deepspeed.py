"""A folder of DeepSpeed that is damaged, mixed, hostile or of another run changes nothing."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import onefold
from onefold import CheckpointError
from onefold.checkpoint.offline import inspect
from onefold.foreign import PEERS
from onefold.foreign.deepspeed_export import export_deepspeed
from tests.foreign.test_deepspeed import DATA, losses_on, wanted_of
from tests.support.deepspeed_runs import PeerNet, built
from tests.support.ranks import run_ranks

MODEL, MODEL_1 = "mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_model_states.pt"
OPTIM_0, OPTIM_1 = (f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1))


def take(name: str, file: str) -> Callable[[Path], None]:
    """Take a file of another run."""

    def act(folder: Path) -> None:
        shutil.copy(DATA / f"deepspeed-{name}" / "t" / file, folder)

    return act


def gone(file: str) -> Callable[[Path], None]:
    return lambda folder: (folder / file).unlink()


def renamed(file: str, name: str) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        (folder / file).rename(folder / name)

    return act


def no_optimizer(folder: Path) -> None:
    for file in (OPTIM_0, OPTIM_1):
        (folder / file).unlink()


def cut(file: str, share: float) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        data = (folder / file).read_bytes()
        (folder / file).write_bytes(data[: int(share * len(data))])

    return act


def bytes_for(file: str, old: bytes, new: bytes) -> Callable[[Path], None]:
    """Put other bytes in place of some, where checksums are those of before."""

    def act(folder: Path) -> None:
        data = (folder / file).read_bytes()
        assert old in data
        (folder / file).write_bytes(data.replace(old, new))

    return act


def saved(file: str, change: Callable[[dict], object]) -> Callable[[Path], None]:
    """Change the values of a file that names no class of DeepSpeed."""

    def act(folder: Path) -> None:
        values = torch.load(folder / file, weights_only=False)
        change(values)
        torch.save(values, folder / file)

    return act


class Runs:
    """Runs a command where it is unpickled by `pickle`."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch ran",)


CASES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "a missing rank": ("stage1", gone(OPTIM_1), "files of optim states of 2 ranks"),
    "a missing first rank": ("stage1", gone(OPTIM_0), "none of rank 0"),
    "a missing rank of stage 3": ("stage3", gone(MODEL_1), "files of model states of 2 ranks"),
    "no optimizer": ("stage1", no_optimizer, "got 0 files"),
    "a file of stage 2": ("stage1", take("stage2", OPTIM_1), "stage 2 in"),
    "a file of stage 3": ("stage1", take("stage3", OPTIM_1), "stage 3 in"),
    "two files of a rank": ("stage1", take("stage1-bf16", f"bf16_{OPTIM_1}"), "one file of optim"),
    "tensor parallelism": ("stage1", renamed(OPTIM_1, OPTIM_1.replace("_00", "_01")), "tensor par"),
    "a degree of tensors": (
        "stage1", saved(MODEL, lambda v: v.update(mp_world_size=2)), "mp_world_size 2",
    ),
    "a pipeline": ("stage1", renamed(OPTIM_1, "layer_00-model_00-model_states.pt"), "a pipeline"),
    "experts": ("stage1", renamed(OPTIM_1, f"expp_rank_0_{MODEL}"), "experts over ranks"),
    "an empty file": ("stage1", cut(OPTIM_1, 0), OPTIM_1),
    "half a file": ("stage1", cut(OPTIM_1, 0.5), OPTIM_1),
    "half a model": ("stage1", cut(MODEL, 0.5), MODEL),
    "a class that nobody allowed": (
        "stage1", saved(MODEL, lambda v: v.update(epoch=Runs())), "a reference to posix.system",
    ),
    "another byte in a pickle": ("stage1", bytes_for(OPTIM_1, b"exp_avg", b"exp_abg"), "CRC-32"),
    "another shape": (
        "stage1",
        saved(MODEL, lambda v: v["param_shapes"][1].update({"norm.bias": torch.Size([6])})),
        "22 elements of param group 1, whose shapes have 23",
    ),
    "a huge shape": (
        "stage3",
        saved(f"zero_pp_rank_0_{MODEL}", lambda v: v["param_shapes"][0].update(
            {"embed.weight": torch.Size([1 << 30, 1 << 30])})), "elements of a partition",
    ),
    "a weight without place": (
        "stage1",
        saved(MODEL, lambda v: v["param_shapes"][0].update({"more": torch.Size([1])})),
        "125 elements of param group 0, whose shapes have 126",
    ),
    "a name outside of the folder": (
        "universal-stage1",
        saved(MODEL, lambda v: v["param_shapes"][0].update({"../../t": torch.Size([1])})),
        "a folder '../../t'",
    ),
    "a missing parameter": (
        "universal-stage1", lambda f: shutil.rmtree(f / "zero" / "norm.bias"), "'norm.bias'",
    ),
    "a missing moment": (
        "universal-stage1", gone("zero/optimizer_state.pt"), "No such file",
    ),
    "a tied name of nothing": (
        "stage1", saved(MODEL, lambda v: v["shared_params"].update(more="nothing")), "'nothing'",
    ),
    "no ZeRO": ("stage1", saved(MODEL, lambda v: v.update(param_shapes=None)), "stage 0"),
}  # fmt: skip


@pytest.fixture(scope="module")
def sharded():
    net, optimizer = built(seed=1)
    onefold.shard(net, optimizer, stage=3)
    return net, optimizer


def refusal(folder: Path, net: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """What `load` says, which has changed no weight and no state."""
    before = {name: value.clone() for name, value in onefold.full_state_dict(net).items()}
    with pytest.raises(CheckpointError) as raised:
        onefold.load(folder, net, optimizer)
    after = onefold.full_state_dict(net)
    assert all(torch.equal(before[name], value) for name, value in after.items())
    assert not optimizer.state
    return " ".join(str(raised.value).split())


@pytest.mark.parametrize("case", CASES)
def test_a_bad_folder_is_refused_by_name(case, sharded, tmp_path, monkeypatch):
    name, act, said = CASES[case]
    folder = tmp_path / "t"
    shutil.copytree(DATA / f"deepspeed-{name}" / "t", folder)
    act(folder)
    monkeypatch.chdir(tmp_path)
    assert said in refusal(folder, *sharded)
    with pytest.raises(CheckpointError):
        inspect(folder, PEERS, verify=True)
    assert not (tmp_path / "ran").exists()


def test_a_weight_of_fewer_bytes_than_elements_is_missing(sharded, tmp_path):
    """4 bytes that would be 4 TiB in memory."""
    folder = tmp_path / "t"
    shutil.copytree(DATA / "deepspeed-stage1" / "t", folder)
    huge = torch.zeros(1).expand(1 << 40)
    saved(MODEL, lambda v: v["module"].update(scale=huge))(folder)
    assert "scale: [5] in the module, not in the checkpoint" in refusal(folder, *sharded)


def test_another_module_and_another_optimizer_are_named():
    class Other(PeerNet):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Linear(5, 8)

    net = Other()
    optimizer = torch.optim.AdamW(net.parameters())
    onefold.shard(net, optimizer, stage=1)
    said = refusal(DATA / "deepspeed-stage3" / "t", net, optimizer)
    assert "wide.weight: [8, 5] in the module, [7, 5] in the checkpoint" in said
    net, adam = built(seed=1)
    optimizer = torch.optim.SGD(adam.param_groups, lr=1e-2, momentum=0.9)
    onefold.shard(net, optimizer, stage=1)
    assert "settings of SGD" in refusal(DATA / "deepspeed-stage3" / "t", net, optimizer)


def _load_and_tell(rank: int, nets: list, folder: Path) -> str:
    net, optimizer = nets[rank]
    onefold.shard(net, optimizer, stage=3)
    return refusal(folder, net, optimizer)


def test_all_ranks_refuse_alike(tmp_path):
    folder = tmp_path / "t"
    shutil.copytree(DATA / "deepspeed-stage3" / "t", folder)
    cut(OPTIM_1, 0.9)(folder)
    said = run_ranks(3, _load_and_tell, [built(seed=1) for _ in range(3)], folder)
    assert all(OPTIM_1 in each for each in said)


@pytest.mark.parametrize("name", ["a/b", "../../escaped", "..", "a\0b"])
def test_a_name_that_is_no_folder_is_not_written(name, tmp_path):
    net = nn.Module()
    net.register_parameter("weight", nn.Parameter(torch.ones(4)))
    net._parameters[name] = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW(net.parameters())
    onefold.shard(net, optimizer, stage=0)
    onefold.save(tmp_path / "own", net, optimizer)
    with pytest.raises(CheckpointError, match="names of folders"):
        export_deepspeed(tmp_path / "own", tmp_path / "deep" / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own"]


@pytest.fixture
def peer_classes(monkeypatch):
    """Classes of the names that optimizer files have, to change such a file."""
    modules = {
        "deepspeed.runtime.fp16.loss_scaler": ["LossScaler"],
        "deepspeed.utils.tensor_fragment": ["fragment_address"],
        "deepspeed.runtime.zero.config": ["ZeroStageEnum"],
    }
    for module, names in modules.items():
        parts = module.split(".")
        for end in range(1, len(parts) + 1):
            package = ".".join(parts[:end])
            if package not in sys.modules:
                monkeypatch.setitem(sys.modules, package, ModuleType(package))
        for name in names:
            bases = (int,) if name == "ZeroStageEnum" else ()
            kind = type(name, bases, {"__module__": module})
            if bases:
                kind.__reduce__ = lambda self, own=kind: (own, (int(self),))
            setattr(sys.modules[module], name, kind)


def fused(values: dict) -> None:
    """Make the states those of DeepSpeed's FusedAdam: its settings, and a step that is an int."""
    base = values["optimizer_state_dict"]["base_optimizer_state"]
    for state, group in zip(base["state"].values(), base["param_groups"], strict=True):
        state["step"] = int(state["step"])
        kept = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay", "params")}
        group.clear()
        group.update(kept, step=0, bias_correction=True)


def test_states_of_fused_adam_are_those_of_torch(peer_classes, tmp_path):
    folder = tmp_path / "t"
    shutil.copytree(DATA / "deepspeed-stage1" / "t", folder)
    for file in (OPTIM_0, OPTIM_1):
        saved(file, fused)(folder)
    losses, _ = losses_on(2, folder, stage=2)
    assert losses == pytest.approx(wanted_of("stage1"), rel=1e-6)


OPTIMIZERS: dict[str, tuple[Callable[[dict], object], str]] = {
    "elastic": (lambda v: v.update(base_optimizer_state=[]), "elastic_checkpoint"),
    "on NVMe": (lambda v: v["base_optimizer_state"]["state"].clear(), "none in the checkpoint"),
    "uncorrected": (
        lambda v: v["base_optimizer_state"]["param_groups"][0].update(bias_correction=False),
        "bias_correction",
    ),
    "no state of a rank": (
        lambda v: v["base_optimizer_state"]["state"].pop(0), "other optimizer states",
    ),
    "a negative padding": (lambda v: v["group_paddings"].__setitem__(0, -9), "elements"),
    "a padding of text": (lambda v: v["group_paddings"].__setitem__(0, "x"), "got TypeError"),
    "paddings of other parameters": (
        lambda v: v["param_alignment_paddings"][0].pop(), "shorter than",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_states_that_cannot_go_on_are_refused(case, peer_classes, sharded, tmp_path):
    change, said = OPTIMIZERS[case]
    folder = tmp_path / "t"
    shutil.copytree(DATA / "deepspeed-stage1" / "t", folder)
    for file in (OPTIM_0, OPTIM_1)[case == "no state of a rank" :]:
        saved(file, lambda values: change(values["optimizer_state_dict"]))(folder)
    assert said in refusal(folder, *sharded)
