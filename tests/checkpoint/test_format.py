"""The files of a checkpoint: what other programs read of them, and what values come back."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import onefold
from onefold import CheckpointError
from onefold.app.cli.main import main
from onefold.checkpoint.listing import tiles
from tests.support.hostile_dcp import save_format_1
from tests.support.models import Model, next_token_loss, token_batches
from tests.support.ranks import run_ranks, seeded


def trained(stage=3):
    module = seeded(lambda: Model(2, tied=True))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    onefold.shard(module, optimizer, stage=stage)
    next_token_loss(module, token_batches(1)[0]).backward()
    optimizer.step()
    optimizer.zero_grad()
    return module, optimizer


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of two ranks, and the weights and moments in it."""

    def body(rank):
        module, optimizer = trained()
        onefold.save(tmp_path / "run", module, optimizer, extra={"rank": rank})
        named = dict(module.named_parameters()).items()
        states = {
            f"{name}.{key}": value.full_tensor() if key != "step" else value.clone()
            for name, parameter in named
            for key, value in optimizer.state[parameter].items()
        }
        return onefold.full_state_dict(module, rank0_only=False), states

    return tmp_path / "run", *run_ranks(2, body)[0]


def test_torchs_reader_gets_weights_and_moments(saved):
    folder, weights, states = saved
    aliases = json.loads((folder / "rank-00000.json").read_text())["aliases"]
    names = [name for name in weights if f"model.{name}" not in aliases]
    state = {
        "model": {name: torch.zeros_like(weights[name]) for name in names},
        **{f"optim.state.{name}": torch.zeros_like(value) for name, value in states.items()},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=HuggingFaceStorageReader(str(folder)))
    assert all(torch.equal(state["model"][name], weights[name]) for name in names)
    assert all(torch.equal(state[f"optim.state.{n}"], value) for n, value in states.items())
    assert aliases == {"model.head.weight": "model.embed.weight"}


def test_safetensors_opens_every_file_and_there_is_no_pickle(saved):
    folder, weights, _ = saved
    names = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                names.add(name)
                file.get_tensor(name)
    assert names >= {f"model.{name}" for name in weights if name != "head.weight"}
    assert {path.suffix for path in folder.iterdir()} == {".safetensors", ".json"}
    assert json.loads((folder / "rank-00001.json").read_text())["objects"]["rank.1"]["extra"]


def test_a_folder_for_dcp_has_all_that_fsdp2_and_torchs_converter_read(saved, tmp_path, capsys):
    folder, weights, states = saved
    assert main(["export", str(folder), "--to", "dcp", str(tmp_path / "dcp")]) == 0
    assert ".metadata" in capsys.readouterr().out
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt")
    assert whole.keys() == {"model", "optim"}
    assert all(torch.equal(whole["model"][name], value) for name, value in weights.items())
    for name, value in states.items():
        fqn, _, key = name.rpartition(".")
        assert torch.equal(whole["optim"]["state"][fqn][key], value), name
    (group,) = whole["optim"]["param_groups"]
    assert group["lr"] == 1e-2
    assert len(group["params"]) == len(weights) - 1
    assert main(["inspect", str(tmp_path / "dcp")]) == 0
    assert "written by torch.distributed.checkpoint" in capsys.readouterr().out

    def body(rank):
        module, optimizer = trained(stage=2)
        assert onefold.load(tmp_path / "dcp", module, optimizer) == {}
        return onefold.full_state_dict(module, rank0_only=False)

    found = run_ranks(3, body)[0]
    assert all(torch.equal(found[name], value) for name, value in weights.items())


def test_masters_are_the_weights_of_a_wide_export_for_dcp(tmp_path, capsys):
    module = seeded(lambda: nn.Linear(8, 8)).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(module.parameters())
    onefold.shard(module, optimizer, precision="bf16")
    module(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    onefold.save(tmp_path / "run", module, optimizer)
    for dtype, wanted in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        out = tmp_path / dtype
        flags = ["--dtype", dtype] if dtype == "fp32" else []
        assert main(["export", str(tmp_path / "run"), str(out), "--to", "dcp", *flags]) == 0
        dcp_to_torch_save(out, tmp_path / "whole.pt")
        assert torch.load(tmp_path / "whole.pt")["model"]["weight"].dtype == wanted
    assert main(["export", str(tmp_path / "run"), "x", "--to", "dcp", "--max-shard-size", "1MB"])
    assert "--max-shard-size with --to hf" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "run"), "x", "--to", "deepspeed"])
    assert "--to to be hf or dcp" in capsys.readouterr().err


def test_a_folder_of_format_1_is_exported_for_dcp(tmp_path):
    module, _ = save_format_1(tmp_path / "old")
    assert main(["export", str(tmp_path / "old"), "--to", "dcp", str(tmp_path / "dcp")]) == 0
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt")["model"]
    wanted = onefold.full_state_dict(module)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_a_failed_export_for_dcp_leaves_nothing(saved, tmp_path, capsys):
    folder, _, _ = saved
    data = folder / "rank-00001.safetensors"
    data.write_bytes(data.read_bytes()[:-1] + b"x")
    assert main(["export", str(folder), "--to", "dcp", str(tmp_path / "dcp")]) == 1
    assert "rank-00001.safetensors" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


class Odd(nn.Module):
    """Buffers of dtypes that safetensors does not name, and of no elements."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 3), value))
        self.register_buffer("wide", torch.full((2, 2), value, dtype=torch.complex128))
        self.register_buffer("one", torch.tensor(value, dtype=torch.complex128))
        self.register_buffer("none", torch.zeros(0, 3))
        self.register_buffer("words", torch.tensor([7], dtype=torch.uint32))
        self.register_buffer("narrow", torch.full((3,), value).to(torch.float8_e4m3fnuz))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values @ self.weight


def test_every_dtype_comes_back(tmp_path):
    def body(rank):
        onefold.save(tmp_path / "run", onefold.shard(Odd(2.0), stage=3))
        module = onefold.shard(Odd(1.0), stage=3)
        onefold.load(tmp_path / "run", module)
        for name, buffer in Odd(2.0).named_buffers():
            found = module.get_buffer(name)
            assert found.dtype == buffer.dtype
            assert found.flatten().tolist() == buffer.flatten().tolist(), name

    run_ranks(2, body)


def test_extra_comes_back_to_the_bit(tmp_path):
    module = onefold.shard(nn.Linear(2, 2))
    shared = torch.arange(4.0)
    kept = {
        "numbers": [0.1, float("inf"), -0.0, 10**30, True, None, 1 - 2j],
        "keys": {1: "a", (1, "b"): "c", None: "d", "!tuple": 1, 2.5: "e"},
        "bytes": [b"", b"\x00\xff" * 100, bytearray(b"ab")],
        "torch": [torch.float16, torch.device("cpu"), torch.Size([1, 2]), torch.strided],
        "text": "\ud800 é \n",
        "shared": [shared, (shared,)],
        "parameter": nn.Parameter(torch.ones(2), requires_grad=False),
        "turned": torch.arange(6).view(2, 3).T,
    }
    onefold.save(tmp_path / "a", module, extra={**kept, "nan": float("nan")})
    found = onefold.load(tmp_path / "a", module)
    assert found.pop("nan") != 0
    assert repr(found) == repr(kept)
    assert found["shared"][0] is found["shared"][1][0]
    for wrong in (torch.ones(2).to_sparse(), lambda: None):
        with pytest.raises(CheckpointError, match="plain values"):
            onefold.save(tmp_path / "b", module, extra=wrong)


def test_a_folder_that_is_a_checkpoint_is_no_folder_of_weights(tmp_path):
    module = onefold.shard(nn.Linear(2, 2))
    onefold.save(tmp_path / "a", module)
    with pytest.raises(CheckpointError, match=r"a checkpoint of onefold\.save"):
        onefold.load_pretrained(module, tmp_path / "a")


BOXES = [
    ([((0, 0), (2, 3)), ((2, 0), (2, 3))], True),
    ([((2, 0), (2, 3)), ((0, 0), (2, 3))], True),
    ([((0, 0), (2, 3)), ((1, 0), (3, 3))], False),
    ([((0, 0), (2, 3)), ((3, 0), (1, 3))], False),
    ([((0, 0), (2, 3))], False),
    ([((0, 0), (4, 3)), ((0, 0), (0, 3))], False),
    ([((0, 0), (4, 1)), ((0, 1), (4, 2))], True),
    ([((0, 0), (4, 1)), ((0, 1), (3, 2))], False),
    ([((0, 1), (4, 3))], False),
]


@pytest.mark.parametrize(("boxes", "are_tiles"), BOXES)
def test_pieces_cover_a_tensor_once_or_do_not(boxes, are_tiles):
    assert tiles(boxes, (4, 3)) == are_tiles
