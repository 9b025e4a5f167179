"""A run of another program goes on here: its next losses, its moments, and what else it saved.

Folders in data/ are those that the programs wrote; tests/support/peer_runs.py is how.
"""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

import onefold
from onefold.app.cli.main import main
from onefold.errors import CheckpointError
from onefold.foreign.dcp import _DcpFile
from onefold.foreign.trees import _TreeFile
from tests.support import peer_runs
from tests.support.hf_ranks import run_forks
from tests.support.peer_runs import LAYOUTS, MORE, NEXT, PeerModel, build, rows, train
from tests.support.ranks import run_ranks
from tests.support.rows import worlds_in_turn

DATA = Path(__file__).parent / "data"
FILES = {"plain": "run.pt", "wrapped": "run.pt", "lightning": "run.ckpt"}
ALONE = json.loads((DATA / "losses.json").read_text())
TOGETHER = json.loads((DATA / "fsdp2.json").read_text())
RUNS = {
    **{name: (DATA / name / FILES.get(name, ""), losses) for name, losses in ALONE.items()},
    **{f"dcp-{layout}": (DATA / f"dcp-{layout}", TOGETHER["fsdp2"]) for layout in LAYOUTS},
    "accelerate-fsdp2": (DATA / "accelerate-fsdp2", TOGETHER["fsdp2"]),
    "rank-files": (DATA / "rank-files", TOGETHER["fsdp2"]),
    "lightning-fsdp2": (DATA / "lightning-fsdp2", TOGETHER["lightning-fsdp2"]),
}
"""The folder or file of each run, and the losses with which its program goes on."""


class Inside(nn.Module):
    """As a module of Lightning has its network."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Any) -> Any:
        return self.net(x)


def fresh(name: str) -> tuple[nn.Module, torch.optim.AdamW]:
    model, optimizer = build(seed=9, lr=7.0)
    return (Inside(model) if name.startswith("lightning") else model), optimizer


def resumed(name: str, path: Path, world_size: int, **options: Any) -> tuple[list[float], Any]:
    """The mean losses of the next steps on so many ranks, and what `load` returned."""
    pairs = [fresh(name) for _ in range(world_size)]

    def body(rank: int) -> tuple[list[float], Any]:
        model, optimizer = pairs[rank]
        onefold.shard(model, optimizer, **options)
        extra = onefold.load(path, model, optimizer)
        return train(model, optimizer, NEXT, rank, world_size), extra

    ranks = run_ranks(world_size, body)
    losses = zip(*(losses for losses, _ in ranks), strict=True)
    return [sum(each) / world_size for each in losses], ranks[0][1]


@worlds_in_turn
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_run_of_another_program_goes_on_at_its_losses(name, world_size):
    """At stages 1 and 3, and with its states in CPU memory."""
    path, wanted = RUNS[name]
    for stage, offload in ((1, None), (3, None), (1, "optimizer"), (3, "optimizer")):
        losses, _ = resumed(name, path, world_size, stage=stage, offload=offload)
        assert len(losses) == MORE
        assert losses == pytest.approx(wanted, rel=1e-6), (stage, offload)


def test_moments_and_settings_are_those_of_the_file_to_the_bit():
    saved = torch.load(DATA / "plain" / "run.pt", weights_only=True)
    module, optimizer = build(seed=9, lr=7.0)
    onefold.shard(module, optimizer)
    extra = onefold.load(DATA / "plain" / "run.pt", module, optimizer)
    state = optimizer.state_dict()
    assert [g["weight_decay"] for g in state["param_groups"]] == [0.1, 0.0]
    assert {g["lr"] for g in state["param_groups"]} == {1e-2}
    for number, moments in saved["opt"]["state"].items():
        for key, value in moments.items():
            assert torch.equal(state["state"][number][key].reshape(value.shape), value), key
    assert torch.equal(extra["rng"], saved["rng"])
    assert extra["epoch"] == 3
    assert extra["sched"]["last_epoch"] == saved["sched"]["last_epoch"]


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("accelerate", {"schedulers", "random_states"}),
        ("trainer", {"scheduler", "trainer_state", "random_states"}),
        ("lightning", {"epoch", "global_step", "lr_schedulers", "loops"}),
        ("lightning-fsdp2", {"epoch", "global_step", "lr_schedulers", "loops"}),
        ("dcp-torchtitan", {"train_state"}),
    ],
)
def test_what_else_a_program_saved_comes_back_under_its_own_names(name, keys):
    model, optimizer = fresh(name)
    onefold.shard(model, optimizer)
    extra = onefold.load(RUNS[name][0], model, optimizer)
    assert keys <= extra.keys()
    if name == "trainer":
        assert extra["trainer_state"]["global_step"] == 3


def test_weights_alone_are_read_without_an_optimizer():
    for name, (path, _) in RUNS.items():
        model, _ = fresh(name)
        onefold.shard(model)
        onefold.load(path, model)
        value = onefold.full_state_dict(model)
        (head,) = [v for n, v in value.items() if n.endswith("head.weight")]
        first = torch.load(DATA / "plain" / "run.pt", weights_only=True)["net"]["head.weight"]
        same = name in ("plain", "wrapped", "accelerate")
        assert torch.equal(head, first) or not same, name


@pytest.mark.parametrize("consolidates", [False, True])
def test_shards_of_torchs_safetensors_writer_are_read_as_one(tmp_path, consolidates):
    """They hold weights alone. torch's own tool makes plain files of them."""
    folder = DATA / "safetensors-shards"
    if consolidates:
        names = dict.fromkeys(build()[0].state_dict(), 1)  # all in the first file
        consolidate_safetensors_files(str(folder), str(tmp_path), names)
        folder = tmp_path
    wanted, _ = build(seed=9)
    onefold.shard(wanted)
    onefold.load(DATA / "dcp-nested", wanted)
    modules = [build(seed=9)[0] for _ in range(3)]

    def body(rank: int) -> Any:
        onefold.shard(modules[rank])
        onefold.load(folder, modules[rank])
        return onefold.full_state_dict(modules[rank])

    found = run_ranks(3, body)[0]
    assert all(torch.equal(found[n], v) for n, v in onefold.full_state_dict(wanted).items())


@pytest.mark.parametrize("folder", ["rank-files", "safetensors-shards"])
def test_files_of_a_rank_that_are_missing_are_named(tmp_path, folder):
    shutil.copytree(DATA / folder, tmp_path / folder)
    for path in [
        *(tmp_path / folder).glob("model*_rank_1.pt"),
        *(tmp_path / folder).glob("shard-00001-*"),
    ]:
        path.unlink()
    refused(tmp_path / folder, "rank 1|pieces that cover")


def test_the_table_of_the_guide_is_what_loading_each_folder_gives():
    from docs.tools import peers_table

    hint = "python -m docs.tools.peers_table"
    assert peers_table.main(["--check"]) == 0, hint


@pytest.mark.parametrize("name", ["plain", "trainer", "dcp-app", "accelerate-fsdp2"])
def test_inspect_lists_what_is_in_a_run_of_another_program(name, capsys):
    assert main(["inspect", str(RUNS[name][0])]) == 0
    printed = capsys.readouterr().out
    assert "head.weight" in printed
    assert "exp_avg" in printed


def test_a_folder_that_transformers_saved_is_read_as_weights(tmp_path):
    """As by `load_pretrained`, with names and layouts of the files."""
    pytest.importorskip("transformers")
    from tests.checkpoint.test_names_in_files import KINDS, built

    model = built(KINDS["experts"])
    model.save_pretrained(tmp_path)
    models = [built(KINDS["experts"], seed=1) for _ in range(3)]

    def body(rank: int) -> Any:
        onefold.shard(models[rank], stage=3)
        assert onefold.load(tmp_path, models[rank]) == {}
        return onefold.full_state_dict(models[rank])

    found = run_ranks(3, body)[0]
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())


def trainers_folder(folder: Path, kind: str) -> tuple[Any, list[float], list[Tensor]]:
    """Three steps of a model of transformers and a folder as Trainer writes it; the next losses."""
    from tests.checkpoint.test_names_in_files import KINDS, built

    batches = [torch.randint(3, 60, (6, 8), generator=torch.Generator().manual_seed(i))
               for i in range(6)]  # fmt: skip
    model = built(KINDS[kind])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = tuned(model, optimizer, batches[:3])
    model.save_pretrained(folder)
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 3}))
    losses = tuned(model, optimizer, batches[3:])
    return KINDS[kind], losses, batches[3:]


def tuned(model: Any, optimizer: Any, batches: list[Tensor], rank: int = 0, size: int = 1) -> Any:
    losses = []
    for batch in batches:
        rows = batch.chunk(size)[rank]
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", ["experts", "tied"])
def test_a_trainers_run_goes_on_where_files_have_other_names_than_the_module(tmp_path, kind):
    """Of experts one by one in the files, and stacked in the module."""
    pytest.importorskip("transformers")
    build, wanted, batches = trainers_folder(tmp_path, kind)
    torch.manual_seed(1)
    models = [build().eval() for _ in range(3)]

    def body(rank: int) -> list[float]:
        optimizer = torch.optim.AdamW(models[rank].parameters(), lr=3.0)
        onefold.shard(models[rank], optimizer, stage=3)
        extra = onefold.load(tmp_path, models[rank], optimizer)
        assert extra["trainer_state"] == {"global_step": 3}
        return tuned(models[rank], optimizer, batches, rank, 3)

    losses = zip(*run_ranks(3, body), strict=True)
    assert [sum(each) / 3 for each in losses] == pytest.approx(wanted, rel=1e-6)


def test_a_trainers_run_with_fsdp_goes_on(tmp_path):
    """Trainer puts the folders of Accelerate beside its own files."""
    shutil.copytree(DATA / "accelerate-fsdp2", tmp_path / "checkpoint-3")
    for path in (tmp_path / "checkpoint-3").glob("random_states_*"):
        path.unlink()
    (tmp_path / "checkpoint-3" / "trainer_state.json").write_text('{"global_step": 3}')
    losses, extra = resumed("trainer", tmp_path / "checkpoint-3", 3, stage=3)
    assert losses == pytest.approx(TOGETHER["fsdp2"], rel=1e-6)
    assert extra == {"trainer_state": {"global_step": 3}}


def test_two_optimizers_of_accelerate_get_their_own_states(tmp_path):
    """`optimizer.bin` and `optimizer_1.bin`."""

    def two(model: PeerModel, lr: float) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW(model.body.parameters(), lr=lr),
                torch.optim.SGD(model.head.parameters(), lr=lr, momentum=0.9)]  # fmt: skip

    def steps(model: Any, both: list[Any], steps: range, rank: int = 0, size: int = 1) -> Any:
        losses = []
        for step in steps:
            loss = peer_runs.loss_of(model, rows(step, rank, size))
            loss.backward()
            for each in both:
                each.step()
                each.zero_grad()
            losses.append(loss.item())
        return losses

    model, _ = build()
    both = two(model, 1e-2)
    steps(model, both, range(3))
    save_file(dict(model.state_dict()), tmp_path / "model.safetensors")
    for name, each in zip(("optimizer.bin", "optimizer_1.bin"), both, strict=True):
        torch.save(each.state_dict(), tmp_path / name)
    torch.save({"step": 3}, tmp_path / "random_states_0.pkl")
    wanted = steps(model, both, NEXT)
    models = [build(seed=9)[0] for _ in range(3)]

    def body(rank: int) -> Any:
        own = two(models[rank], 3.0)
        onefold.shard(models[rank], own, stage=3)
        onefold.load(tmp_path, models[rank], own)
        return steps(models[rank], own, NEXT, rank, 3)

    losses = zip(*run_ranks(3, body), strict=True)
    assert [sum(each) / 3 for each in losses] == pytest.approx(wanted, rel=1e-6)


def adapted(seed: int) -> Any:
    """The same base, with adapters of their own."""
    import peft

    from tests.checkpoint.test_names_in_files import KINDS, built

    model = built(KINDS["exact"])
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False,
                             modules_to_save=["lm_head"])  # fmt: skip
    return peft.get_peft_model(model, config)


def trained_by(model: Any, lr: float) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*frozen weights are not in the ch")
def test_a_trainers_run_of_adapters_goes_on_without_their_base(tmp_path):
    """Its folder has adapters alone, under names without theirs."""
    pytest.importorskip("peft")
    batches = list(torch.randint(3, 60, (6, 6, 8), generator=torch.Generator().manual_seed(0)))
    model = adapted(seed=1)
    optimizer = trained_by(model, lr=1e-2)
    tuned(model, optimizer, batches[:3])
    model.save_pretrained(tmp_path)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": 3}))
    wanted = tuned(model, optimizer, batches[3:])
    models = [adapted(seed=2) for _ in range(4)]
    optimizers = [trained_by(each, lr=3.0) for each in models]

    def body(rank: int) -> list[float]:
        onefold.shard(models[rank], optimizers[rank], stage=3)
        onefold.load(tmp_path, models[rank], optimizers[rank])
        return tuned(models[rank], optimizers[rank], batches[3:], rank, 3)

    losses = zip(*run_ranks(3, body), strict=True)
    assert [sum(each) / 3 for each in losses] == pytest.approx(wanted, rel=1e-6)
    onefold.shard(models[3], optimizers[3])
    with pytest.warns(UserWarning, match="frozen weights are not in the checkpoint, and stay"):
        onefold.load(tmp_path, models[3], optimizers[3])
    assert tuned(models[3], optimizers[3], batches[3:]) == pytest.approx(wanted, rel=1e-6)


# bad input


def refused(path: Path, words: str, name: str = "plain", **changes: Any) -> None:
    """Every rank refuses alike, and nothing has changed."""
    pairs = [fresh(name) for _ in range(3)]

    def body(rank: int) -> str:
        model, optimizer = pairs[rank]
        if "optimizer" in changes:
            optimizer = changes["optimizer"](model)
        onefold.shard(model, optimizer)
        before = onefold.full_state_dict(model, rank0_only=False)
        with pytest.raises(CheckpointError, match=words) as error:
            onefold.load(path, model, optimizer)
        after = onefold.full_state_dict(model, rank0_only=False)
        assert all(torch.equal(after[key], value) for key, value in before.items())
        return str(error.value)

    assert len(set(run_ranks(3, body))) == 1


def changed(tmp_path: Path, change: Any) -> Path:
    state = torch.load(DATA / "plain" / "run.pt", weights_only=True)
    change(state)
    torch.save(state, tmp_path / "run.pt")
    return tmp_path / "run.pt"


def test_two_entries_with_the_names_of_the_module_are_both_named(tmp_path):
    path = changed(tmp_path, lambda state: state.update(ema=dict(state["net"])))
    refused(path, "one entry with the names of the module, got '(net|ema)' and '(net|ema)'")


def test_the_parent_of_another_programs_folder_says_which_one_to_pass():
    module = nn.Linear(1, 1)
    onefold.shard(module)
    with pytest.raises(CheckpointError, match="t: of DeepSpeed, which loads where this folder"):
        onefold.load(DATA / "deepspeed-stage1", module)


@pytest.mark.parametrize("where", [(), ("model",)])
def test_a_module_that_was_pickled_whole_is_named(tmp_path, where):
    """Its class would have to be imported, and run."""
    module = nn.Sequential(nn.Linear(2, 2))
    torch.save({"model": module} if where else module, tmp_path / "run.pt")
    onefold.shard(module)
    with pytest.raises(CheckpointError, match=r"a torch\.nn\.modules\.container\.Sequential"):
        onefold.load(tmp_path / "run.pt", module)


def test_an_optimizer_without_states_is_no_extra(tmp_path):
    """Plain SGD has none."""
    model, _ = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.save({"net": model.state_dict(), "opt": optimizer.state_dict()}, tmp_path / "run.pt")
    onefold.shard(model, optimizer)
    assert onefold.load(tmp_path / "run.pt", model, optimizer) == {}


def test_another_module_is_named(tmp_path):
    path = changed(tmp_path, lambda state: state["net"].pop("head.bias"))
    refused(path, "head.bias")


def test_an_optimizer_of_another_class_is_named():
    def sgd(model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    refused(DATA / "plain" / "run.pt", "param groups in 'opt'", optimizer=sgd)

    def two_groups(model: Any) -> Any:
        groups = [{"params": model.body.parameters()}, {"params": model.head.parameters()}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    refused(
        DATA / "plain" / "run.pt", "settings of SGD in 'opt'.*'dampening'", optimizer=two_groups
    )


def test_other_groups_are_named(tmp_path):
    def move(state: Any) -> None:
        groups = state["opt"]["param_groups"]
        groups[0]["params"], groups[1]["params"] = [0], [1, 2, 3]

    refused(changed(tmp_path, move), "parameters in param group")


def test_no_code_of_a_file_runs_and_its_class_is_named(tmp_path):
    mark = tmp_path / "ran"

    class Runs:
        def __reduce__(self) -> Any:
            import os

            return os.system, (f"touch {mark}",)

    state = torch.load(DATA / "plain" / "run.pt", weights_only=True)
    torch.save({**state, "evil": Runs()}, tmp_path / "run.pt")
    model, optimizer = build()
    onefold.shard(model, optimizer)
    with pytest.warns(UserWarning, match=r"evil: .*(posix|os|nt)\.system"):
        extra = onefold.load(tmp_path / "run.pt", model, optimizer)
    assert not mark.exists()
    assert "evil" not in extra


def test_arrays_of_numbers_come_back_as_lists_and_arrays_of_objects_are_left_out(tmp_path):
    state = torch.load(DATA / "plain" / "run.pt", weights_only=True)
    kept = numpy.arange(6, dtype=numpy.float32).reshape(2, 3)
    torch.save({**state, "kept": kept, "odd": numpy.array([{}, "x"])}, tmp_path / "run.pt")
    model, optimizer = build()
    onefold.shard(model, optimizer)
    with pytest.warns(UserWarning, match="odd: .*numpy.ndarray of objects"):
        extra = onefold.load(tmp_path / "run.pt", model, optimizer)
    assert extra["kept"] == kept.tolist()
    assert "odd" not in extra


def test_numbers_as_keys_stay_keys_and_lists_stay_lists(tmp_path):
    """An index of 10**9 would else make a list of as many."""
    kept = {5: "a", 10**9: {"1": 2}, -1: [{"x": 1}, {0: torch.ones(2)}]}
    state = torch.load(DATA / "plain" / "run.pt", weights_only=True)
    torch.save({**state, "kept": kept}, tmp_path / "run.pt")
    model, optimizer = build()
    onefold.shard(model, optimizer)
    found = onefold.load(tmp_path / "run.pt", model, optimizer)["kept"]
    assert torch.equal(found[-1][1].pop(0), kept[-1][1].pop(0))
    assert found == kept
    assert {type(key) for key in found} == {int}


def test_views_of_one_storage_are_read_as_themselves(tmp_path):
    """A matrix and its transpose, of the same bytes and sizes."""
    square = torch.arange(16.0).reshape(4, 4)
    saved = {"a.weight": square, "b.weight": square.T, "c.weight": square[:, 1::2]}
    torch.save({"model": saved}, tmp_path / "views.pt")
    sizes = {"a": (4, 4), "b": (4, 4), "c": (2, 4)}
    modules = [nn.ModuleDict({n: nn.Linear(*s, bias=False) for n, s in sizes.items()})
               for _ in range(3)]  # fmt: skip

    def body(rank: int) -> Any:
        onefold.shard(modules[rank], stage=3)
        onefold.load(tmp_path / "views.pt", modules[rank])
        return onefold.full_state_dict(modules[rank])

    for name, value in run_ranks(3, body)[0].items():
        assert torch.equal(value, saved[name]), name


def test_a_tensor_of_fewer_bytes_than_elements_is_left_out(tmp_path):
    """4 bytes that would be 4 TiB in memory; `torch.save` keeps expanded tensors so."""
    state = torch.load(DATA / "plain" / "run.pt", weights_only=True)
    state["net"]["head.weight"] = torch.zeros(1, 1).expand(4, 10)
    state["huge"] = torch.zeros(1).expand(1 << 40)
    torch.save(state, tmp_path / "run.pt")
    refused(tmp_path / "run.pt", "head.weight: .*not in the checkpoint")


def save_own_file(rank: int, folder: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    module = nn.Linear(3, 5)
    module.weight.data = torch.arange(15.0).reshape(5, 3)
    fully_shard(module)
    torch.save(module.state_dict(), folder / f"model_world_size_4_rank_{rank}.pt")


@pytest.mark.process
def test_ranks_without_rows_have_empty_pieces(tmp_path):
    """FSDP2 cuts 5 rows for 4 ranks: 2, 2, 1 and none."""
    run_forks(4, save_own_file, tmp_path)
    module = nn.Linear(3, 5)
    onefold.shard(module)
    onefold.load(tmp_path, module)
    found = onefold.full_state_dict(module)["weight"]
    assert torch.equal(found, torch.arange(15.0).reshape(5, 3))


def test_each_rank_reads_its_rows_and_no_more_than_one_parameter(monkeypatch):
    """Of whole files, too: a file of `torch.save` is read by byte range."""
    for name in ("plain", "trainer", "dcp-nested", "rank-files", "accelerate-fsdp2"):
        read: dict[int, int] = {}
        for kind in (_TreeFile, _DcpFile):
            whole = kind.read_elements

            def counted(self: Any, wanted: Any, out: memoryview, whole: Any = whole) -> None:
                ident = threading.get_ident()
                if wanted.dtype == torch.float32:  # random states are bytes
                    read[ident] = read.get(ident, 0) + len(out)
                whole(self, wanted, out)

            monkeypatch.setattr(kind, "read_elements", counted)
        resumed(name, RUNS[name][0], 3, stage=3)
        monkeypatch.undo()
        numels = [p.numel() for p in build()[0].parameters()]
        states = 3 * 4  # bytes of a weight and two moments
        rest = 64  # numbers, which every rank reads
        assert len(read) == 3, name
        assert max(read.values()) <= (sum(numels) / 3 + max(numels)) * states + rest, name


@pytest.mark.parametrize("kept", [10, 3000, 9000])
def test_a_truncated_file_is_refused(tmp_path, kept):
    data = (DATA / "plain" / "run.pt").read_bytes()
    (tmp_path / "run.pt").write_bytes(data[:kept])
    refused(tmp_path / "run.pt", "run.pt")


def test_a_file_of_an_older_torch_and_one_that_is_compressed_are_refused(tmp_path):
    state = torch.load(DATA / "plain" / "run.pt", weights_only=True)
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    refused(tmp_path / "old.pt", "older torch")
    import zipfile

    with (
        zipfile.ZipFile(DATA / "plain" / "run.pt") as source,
        zipfile.ZipFile(tmp_path / "small.pt", "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for record in source.infolist():
            target.writestr(record.filename, source.read(record))
    refused(tmp_path / "small.pt", "compressed record")


def test_a_part_of_a_folder_that_is_missing_is_named(tmp_path):
    shutil.copytree(DATA / "dcp-nested", tmp_path / "part")
    (tmp_path / "part" / "__1_0.distcp").unlink()
    refused(tmp_path / "part", "__1_0.distcp")
    shutil.copytree(DATA / "trainer", tmp_path / "trainer")
    (tmp_path / "trainer" / "optimizer.pt").unlink()
    refused(tmp_path / "trainer", "an optimizer to load, none in the checkpoint", name="trainer")


@pytest.mark.again(
    "tests/foreign/test_peers.py::test_a_run_of_another_program_goes_on_at_its_losses"
)
@pytest.mark.parametrize("name", peer_runs.ALONE)
@pytest.mark.filterwarnings("ignore")
def test_what_the_installed_programs_write_today_goes_on(tmp_path, name):
    pytest.importorskip({"trainer": "transformers"}.get(name, name) if name in (
        "trainer", "accelerate", "lightning") else "torch")  # fmt: skip
    peer_runs.write(tmp_path, name)
    wanted = json.loads((tmp_path / "losses.json").read_text())[name]
    losses, _ = resumed(name, tmp_path / name / FILES.get(name, ""), 2, stage=3)
    assert losses == pytest.approx(wanted, rel=1e-6)


def test_rows_of_the_global_batch_are_the_same_on_any_number_of_ranks():
    assert torch.equal(torch.cat([rows(4, rank, 3) for rank in range(3)]), rows(4))
