"""What `onefold train` is made of: the corpus, the model, the closed form, the loop, the check."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import onefold
from onefold.app.generate import sources
from onefold.app.generate.tokens import one_line
from onefold.app.tools.machine import checks, describe
from onefold.app.tools.parity import difference
from onefold.app.train.corpus import Corpus, Split, Windows, open_corpus, own_rows
from onefold.app.train.job import Job
from onefold.app.train.loop import preflight, schedule, train
from onefold.app.train.memory_table import expected_nbytes, measure
from onefold.app.train.run_record import Progress, TrainObserver, loss_of_rows
from onefold.config import STAGES
from onefold.engine.registry import engine_of
from onefold.errors import ConfigError
from onefold.planner.memory import forecast
from onefold.planner.models.gpt import GPT, PRESETS, GPTConfig
from onefold.planner.models.loader import build_model, described, logits_of, refuse
from onefold.planner.trace import tokens_of, trace
from onefold.recipe import Member, Recipe, UnitRecipe
from onefold.text import counted, format_bytes
from onefold.tier.host import memory_nbytes
from onefold.wire.collectives import Group
from onefold.wire.world import World
from tests.support.commands import onefold as onefold_command
from tests.support.free_memory import has_free
from tests.support.models import Model
from tests.support.planned import is_equal
from tests.support.ranks import run_ranks, seeded
from tests.support.rows import again_but, worlds_in_turn

UNSEEDED = "tests.app.test_training:unseeded_gpt"

CPU = torch.device("cpu")
SMALL = GPTConfig(num_layers=2, width=32, num_heads=4, lr=1e-3)


@dataclass
class Notes(TrainObserver):
    """An observer that remembers."""

    num_parameters: int = 0
    notes: list[str] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)
    is_trained: bool = False

    def started(self, job: Job, corpus: Corpus, num_parameters: int, world_size: int) -> None:
        self.num_parameters = num_parameters

    def noted(self, note: str) -> None:
        self.notes.append(note)

    def stepped(self, progress: Progress) -> None:
        self.progress.append(progress)

    def trained(self) -> None:
        self.is_trained = True


def world_of_one() -> World:
    return World(Group.from_handle(None), CPU)


def unseeded_gpt() -> nn.Module:
    """Weights that no generator decides: ranks that are threads share one."""
    with torch.device("meta"):
        module = GPT(SMALL, 16)
    module.to_empty(device="cpu")
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            waves = torch.arange(parameter.numel(), dtype=torch.float32) * (0.7 + 0.01 * number)
            parameter.copy_(waves.sin().view(parameter.shape) / 5)
    return module


def narrow() -> nn.Module:
    """A vocabulary that bytes do not fit in."""
    return nn.Sequential(nn.Embedding(256, 4), nn.Linear(4, 100))


def not_a_module() -> int:
    return 3


def fails() -> nn.Module:
    raise RuntimeError("no weights\nat all")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three hundred small text files, each with a text of its own."""
    for number in range(300):
        path = tmp_path / f"part{number % 7}" / f"file{number}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"This is file number {number}.\n" * 3)
    return tmp_path


def names(split: Split) -> set[str]:
    return {span.path.name for span in split.spans}


# corpus


def test_the_split_is_the_same_each_time_disjoint_and_covers_every_file(folder):
    first, second = open_corpus(str(folder), 16), open_corpus(str(folder), 16)
    assert (first.train.spans, first.held_out.spans) == (second.train.spans, second.held_out.spans)
    assert not names(first.train) & names(first.held_out)
    assert len(names(first.train) | names(first.held_out)) == 300
    assert 5 <= len(first.held_out.spans) <= 30


def test_a_new_file_moves_no_other_file_to_the_other_split(folder):
    before = open_corpus(str(folder), 16)
    (folder / "new.txt").write_text("new\n" * 20)
    after = open_corpus(str(folder), 16)
    assert names(after.train) - {"new.txt"} == names(before.train)
    assert names(after.held_out) - {"new.txt"} == names(before.held_out)


def test_one_file_is_split_by_its_bytes(tmp_path):
    (tmp_path / "all.txt").write_bytes(bytes(range(32, 127)) * 20)
    corpus = open_corpus(str(tmp_path), 16)
    assert corpus.train.nbytes + corpus.held_out.nbytes == 95 * 20
    assert corpus.held_out.nbytes == 95
    assert corpus.held_out.read_bytes(0, 95) == bytes(range(32, 127))


@pytest.mark.parametrize("count", [2, 3, 5])
def test_a_few_files_still_give_both_splits_something(tmp_path, count):
    for number in range(count):
        (tmp_path / f"{number}.txt").write_text("some text " * 10)
    corpus = open_corpus(str(tmp_path), 16)
    assert corpus.train.spans
    assert corpus.held_out.spans


def test_binary_empty_and_hidden_files_are_not_text(tmp_path):
    (tmp_path / "a.txt").write_text("text " * 50)
    (tmp_path / "b.txt").write_text("more " * 50)
    (tmp_path / "c.bin").write_bytes(b"\x7fELF\0\0" * 50)
    (tmp_path / "empty").touch()
    (tmp_path / ".hidden").write_text("secret " * 50)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("secret " * 50)
    corpus = open_corpus(str(tmp_path), 16)
    assert names(corpus.train) | names(corpus.held_out) == {"a.txt", "b.txt"}


def test_a_folder_without_text_or_no_folder_or_too_little_text_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="got no text in"):
        open_corpus(str(tmp_path), 16)
    with pytest.raises(ConfigError, match="got no folder"):
        open_corpus(str(tmp_path / "missing"), 16)
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(ConfigError, match="more than 16 bytes"):
        open_corpus(str(tmp_path), 16)


def test_the_default_corpus_is_the_standard_library_without_its_tests():
    corpus = open_corpus(None, 64)
    parts = {part for split in (corpus.train, corpus.held_out)
             for span in split.spans for part in span.path.parts}  # fmt: skip
    assert "argparse.py" in parts
    assert not parts & {"site-packages", "test", "tests"}
    assert corpus.train.nbytes > 10 * corpus.held_out.nbytes / 3 > 0


def test_reading_crosses_files(tmp_path):
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text(str(number) * 7)
    corpus = open_corpus(str(tmp_path), 5)
    text = b"".join(span.path.read_bytes() for span in corpus.train.spans)
    assert corpus.train.nbytes == len(text)
    for start in range(len(text)):
        for stop in range(start + 1, len(text) + 1):
            assert corpus.train.read_bytes(start, stop - start) == text[start:stop]


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_text("text " * 50)
    corpus = open_corpus(str(tmp_path), 8)
    (tmp_path / "a.txt").write_text("gone")
    with pytest.raises(ConfigError, match="to keep its"):
        corpus.held_out.read_bytes(0, 8)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_which_rows_are_trained_on_does_not_depend_on_the_world(folder, world_size):
    split = open_corpus(str(folder), 16).train

    def batches(own: range) -> list[torch.Tensor]:
        windows = Windows(split, rows=7, seq=16, seed=3, own=own)
        return [next(windows) for _ in range(4)]

    whole = batches(range(7))
    cut = [batches(own_rows(7, rank, world_size)) for rank in range(world_size)]
    for step, batch in enumerate(whole):
        assert batch.shape == (7, 17)
        assert torch.equal(torch.cat([rank[step] for rank in cut]), batch)


# model


def test_a_gpt_gives_logits_of_the_next_byte_that_see_no_later_byte():
    module = GPT(SMALL, 16)
    tokens = torch.randint(0, 256, (3, 12))
    logits = module(tokens)
    assert logits.shape == (3, 12, 256)
    tokens[:, 8:] = (tokens[:, 8:] + 1) % 256
    changed = module(tokens)
    assert torch.equal(changed[:, :8], logits[:, :8])
    assert not torch.equal(changed[:, 8:], logits[:, 8:])


def test_an_untrained_gpt_is_about_as_good_as_guessing():
    torch.manual_seed(0)
    tokens = torch.randint(0, 256, (8, 33))
    logits = GPT(PRESETS["tiny"], 32)(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert 5.4 < loss.item() < 6.5  # log(256) is 5.55


def test_a_tied_head_is_the_embedding():
    tied = GPT(GPTConfig(num_layers=1, width=32, num_heads=4, lr=1e-3, is_tied=True), 16)
    assert tied.head.weight is tied.tokens.weight


@pytest.mark.parametrize(("name", "low", "high"), [
    ("tiny", 0.8e6, 1.1e6), ("mini", 4e6, 6e6), ("small", 56e6, 59e6),
])  # fmt: skip
def test_presets_are_built_on_meta_and_have_the_documented_numbers_of_parameters(name, low, high):
    module = build_model(name, 128)
    assert all(parameter.is_meta for parameter in module.parameters())
    assert low < sum(parameter.numel() for parameter in module.parameters()) < high


# loader


@pytest.mark.parametrize(("model", "message"), [
    ("tini", "did you mean 'tiny'"),
    ("nosuch:build", "No module named 'nosuch'"),
    ("tests.app.test_training:nosuch", "no attribute 'nosuch'"),
    ("tests.app.test_training:CPU", "to be a function"),
    ("missing/config.json", "readable Hugging Face config.json"),
])  # fmt: skip
def test_a_model_that_cannot_be_is_refused_without_building_it(model, message):
    with pytest.raises(ConfigError, match=message):
        refuse(model, 64)


@pytest.mark.parametrize(("model", "message"), [
    ("tests.app.test_training:not_a_module", "got type int"),
    ("tests.app.test_training:fails", r"RuntimeError: no weights \(test_training.py:\d+\)"),
])  # fmt: skip
def test_a_function_that_gives_no_module_is_refused_when_it_is_called(model, message):
    with pytest.raises(ConfigError, match=message):
        build_model(model, 64)


def test_a_model_with_too_few_tokens_for_bytes_is_refused():
    with pytest.raises(ConfigError, match=r"got \[2, 4, 100\]"):
        logits_of(narrow(), torch.zeros(2, 4, dtype=torch.long))


def test_an_error_is_described_in_one_line_that_points_to_the_users_file():
    with pytest.raises(RuntimeError) as caught:
        fails()
    assert "\n" not in described(caught.value)
    assert described(caught.value).endswith(".py:" + str(fails.__code__.co_firstlineno + 1) + ")")


@pytest.mark.parametrize(("config", "message"), [
    ("{", "readable"),
    ("[]", "model_type"),
    ('{"model_type": "gpt2", "vocab_size": 100}', "256 tokens, got 100"),
    ('{"model_type": "gpt2", "n_positions": 32}', "at most 32 tokens"),
    ('{"model_type": "nosuch"}', "causal language model"),
    ('{"model_type": "bart"}', "has an encoder too"),
])  # fmt: skip
def test_a_config_that_cannot_train_on_bytes_is_refused(tmp_path, config, message):
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(config)
    with pytest.raises(ConfigError, match=message):
        build_model(str(path), 64)


def test_encoders_are_the_types_of_transformers_that_see_the_next_token():
    transformers = pytest.importorskip("transformers")
    auto = transformers.models.auto.modeling_auto
    types = {*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} & {*auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES}
    configs = [transformers.AutoConfig.for_model(kind) for kind in types]
    assert {
        c.model_type for c in configs
        if not c.is_encoder_decoder and getattr(c, "is_decoder", True) is False
    } == sources.ENCODERS  # fmt: skip


@pytest.mark.parametrize("command", [sources.check_trained, sources.opened])
def test_an_encoder_neither_trains_on_the_next_byte_nor_generates(command, tmp_path):
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    shape = {"model_type": "bert", "vocab_size": 256}

    def says(**more):
        path.write_text(json.dumps(shape | more))
        if command is sources.check_trained:
            command(str(path), 32)
        else:
            with command(str(path)):
                pass

    with pytest.raises(ConfigError, match="bert, an encoder"):
        says()
    with pytest.raises(ConfigError, match="bert, an encoder"):
        says(architectures=["BertModel"])
    says(is_decoder=True)
    says(architectures=["BertLMHeadModel"])


def test_a_hugging_face_config_becomes_a_model_with_logits(tmp_path):
    pytest.importorskip("transformers")
    shape = {"vocab_size": 256, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **shape, **tokens}))
    module = build_model(str(tmp_path), 64)
    assert logits_of(module, torch.zeros(2, 5, dtype=torch.long)).shape == (2, 5, 256)


def test_training_the_language_model_in_a_model_that_sees_says_so(folder, tmp_path):
    transformers = pytest.importorskip("transformers")
    text = {
        "vocab_size": 256, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
        "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }  # fmt: skip
    sight = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    config = transformers.Qwen3_5Config(text_config=text, vision_config=sight)
    config.architectures = ["Qwen3_5ForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    notes = Notes()
    sizes = {"steps": 1, "rows": 2, "seq": 8, "sample": 0}
    job = Job(model=str(tmp_path / "config.json"), data=str(folder), **sizes)
    train(job, world_of_one(), notes)
    (note,) = notes.notes
    with torch.device("meta"):
        whole = transformers.Qwen3_5ForConditionalGeneration(config)
    total = sum(p.numel() for p in whole.parameters())
    assert note.startswith(f"{total - notes.num_parameters:,} of the {total:,} parameters of")


# memory


@worlds_in_turn
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_closed_form_is_what_the_report_counts_for_odd_shapes(world_size, stage, dtype):
    def body(rank: int) -> tuple[dict[str, int], dict[str, int]]:
        module = Model().to(dtype)
        optimizer = torch.optim.AdamW(module.parameters())
        onefold.shard(module, optimizer, stage=stage)
        module(torch.zeros(2, 6, dtype=torch.long)).float().square().mean().backward()
        optimizer.step()
        memory = measure(engine_of(module).recipe, onefold.report(module))
        assert is_equal(memory)
        return {kind: memory.now.get(kind, 0) for kind in memory.expected}, memory.expected

    for held, wanted in run_ranks(world_size, body):
        assert held == wanted


@again_but("3-replicas")
@worlds_in_turn
@pytest.mark.parametrize("wire", ["hybrid", "replicas"])
@pytest.mark.parametrize("stage", [1, 3])
def test_the_closed_form_of_nodes_is_what_the_report_counts(wire, stage):
    def body(rank: int) -> int:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "place"))
        module = seeded(Model)
        optimizer = torch.optim.AdamW(module.parameters())
        onefold.shard(module, optimizer, stage=stage, mesh=mesh, wire=wire)
        module(torch.zeros(2, 6, dtype=torch.long)).square().mean().backward()
        optimizer.step()
        report = onefold.report(module)
        assert is_equal(measure(engine_of(module).recipe, report))
        return report.num_shards

    assert run_ranks(4, body) == [{"hybrid": 4, "replicas": 2}[wire]] * 4


def test_the_closed_form_for_even_shapes_is_that_of_the_paper():
    members = [
        Member(name, shape, torch.float32, torch.float32)
        for name, shape in {"matrix": (64, 32), "vector": (128,)}.items()
    ]
    units = (UnitRecipe("unit", tuple(members)),)
    numel = 64 * 32 + 128
    for world_size, num_shards in ((4, 1), (4, 4), (2, 2), (1, 1)):
        recipe = Recipe(stage=STAGES[3 * (num_shards > 1)], world_size=world_size, units=units)
        for shard in range(num_shards):
            held = expected_nbytes(recipe, shard)
            share = numel // num_shards
            wanted = {"weight": 4 * share, "master": 0, "grad": 4 * share, "optimizer": 8 * share}
            assert held == wanted


# loop


@again_but("0-3", "3-2")
@worlds_in_turn
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_run_holds_the_closed_form_and_gives_every_rank_the_same_result(
    folder, world_size, stage
):
    job = Job(model=UNSEEDED, data=str(folder), steps=3, rows=6,
              seq=16, stage=stage)  # fmt: skip

    def body(rank: int) -> tuple[Notes, object]:
        notes = Notes()
        return notes, train(job, World(Group.from_handle(dist.group.WORLD), CPU), notes)

    results = run_ranks(world_size, body)
    notes, first = results[0]
    assert all(result.losses == first.losses for _, result in results)
    assert len(first.memory) == world_size
    assert all(is_equal(memory) for memory in first.memory)
    assert first.memory[0].now["weight"] == first.memory[0].expected["weight"]
    assert len(first.losses) == 3
    assert first.losses[-1] < first.losses[0]
    assert notes.is_trained
    assert notes.progress[-1].step == 3
    assert notes.num_parameters == sum(p.numel() for p in unseeded_gpt().parameters())


@again_but("3-2")
@worlds_in_turn
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("world_size", [2, 3])
def test_losses_are_those_of_one_process_however_rows_are_cut(folder, accumulate, world_size):
    options = {"data": str(folder), "steps": 3, "rows": 7, "seq": 16, "lr": 1e-3}
    alone = train(Job(model=UNSEEDED, **options), world_of_one(), Notes())
    job = Job(model=UNSEEDED, accumulate=accumulate, **options)

    def body(rank: int) -> object:
        return train(job, World(Group.from_handle(dist.group.WORLD), CPU), Notes())

    result = run_ranks(world_size, body)[0]
    assert result.losses == pytest.approx(alone.losses, rel=1e-5)
    assert result.held_out == pytest.approx(alone.held_out, rel=1e-4)
    assert result.text.startswith(one_line(open_corpus(str(folder), 16).prompt))


WEIGHTS = Path()
"""Where `from_files` finds a saved model."""
LOADING = threading.Lock()
"""transformers 5.23 replaces `tie_weights` while it loads: for good, where two threads load."""


def from_files() -> nn.Module:
    """The model of a folder, as a user builds it: whole, from its files."""
    if not (WEIGHTS / "config.json").exists():
        module: nn.Module = GPT(PRESETS["tiny"], 16)
        return onefold.load_pretrained(module, WEIGHTS)
    import transformers

    with LOADING:
        return transformers.AutoModelForCausalLM.from_pretrained(WEIGHTS, use_cache=False)


def saved_model(kind: str, folder: Path) -> Path:
    if kind == "byte GPT":
        module = seeded(lambda: GPT(PRESETS["tiny"], 16), seed=5)
        onefold.shard(module)
        onefold.save_pretrained(module, folder)
        return folder
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=32,
        tie_word_embeddings=False,  # transformers turns tying off for all threads while it builds
    )  # fmt: skip
    torch.manual_seed(5)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@worlds_in_turn
@pytest.mark.parametrize("kind", ["byte GPT", "Hugging Face"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_folder_with_weights_is_trained_from_them(
    folder, tmp_path, kind, world_size, monkeypatch
):
    monkeypatch.setitem(globals(), "WEIGHTS", saved_model(kind, tmp_path / "saved"))
    options = {"data": str(folder), "steps": 2, "rows": 3, "seq": 16, "lr": 1e-3, "sample": 0}

    def losses(model: str, stage: int) -> list[float]:
        job = Job(model=model, stage=stage, **options)
        if world_size == 1:
            return train(job, world_of_one(), Notes()).losses

        def body(rank: int) -> list[float]:
            return train(job, World(Group.from_handle(dist.group.WORLD), CPU), Notes()).losses

        return run_ranks(world_size, body)[0]

    by_hand = losses("tests.app.test_training:from_files", 3)
    assert by_hand == losses(str(WEIGHTS), 3) == losses(str(WEIGHTS), 1)
    assert by_hand != losses("tests.app.test_training:unseeded_gpt", 3)


def test_a_folder_that_cannot_be_trained_from_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "vocab_size": 256}')
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"safetensors files in --model .*\n.*random weights"):
        preflight(Job(model=str(tmp_path)), 1)
    saved = saved_model("byte GPT", tmp_path / "saved")
    preflight(Job(model=str(saved), seq=16), 1)
    with pytest.raises(ConfigError, match="rows of at most 16 bytes"):
        preflight(Job(model=str(saved), seq=17), 1)
    module = seeded(lambda: GPT(PRESETS["tiny"], 16))
    onefold.shard(module)
    onefold.save(tmp_path / "runs" / "step-1", module)
    with pytest.raises(ConfigError, match=r"got a checkpoint\nhint: `onefold export"):
        preflight(Job(model=str(tmp_path / "runs")), 1)


def test_fp16_trains_with_a_loss_scale(folder):
    job = Job(model=UNSEEDED, data=str(folder), steps=4, rows=4, seq=16,
              precision="fp16", lr=1e-3)  # fmt: skip
    result = train(job, world_of_one(), Notes())
    assert all(0 < loss < 7 for loss in result.losses)


@pytest.mark.parametrize(("changes", "message"), [
    ({"stage": 4}, 'stage to be 0, 1, 2, 3 or "auto", got 4'),
    ({"precision": "int8"}, "got 'int8'"),
    ({"rows": 3}, "at least 4 rows in a step"),
    ({"rows": 7, "accumulate": 2}, "at least 8 rows"),
    ({"model": "nosuch:build"}, "to import"),
    ({"data": "/nonexistent"}, "no folder"),
])  # fmt: skip
def test_bad_input_is_refused_before_any_rank_starts(changes, message):
    with pytest.raises(ConfigError, match=message):
        preflight(Job(**changes), 4)


def test_the_learning_rate_rises_to_its_peak_and_falls_to_a_small_share():
    rates = [schedule(step, 200) for step in range(200)]
    peak = max(range(200), key=rates.__getitem__)
    assert rates[0] < 0.1
    assert rates[peak] > 0.95
    assert 15 <= peak <= 25
    assert rates[-1] < 0.06
    assert all(0 < schedule(step, 1) <= 1 for step in range(1))


def test_text_is_one_printable_line():
    assert one_line(b"def f():\n\treturn '\xc3\xa9\xff'") == r"def f():\n\treturn '\xe9\ufffd'"


# check and doctor


def test_the_difference_names_the_parameter_that_is_furthest_off():
    wanted = {"a": torch.ones(3), "b": torch.full((2,), 10.0), "c": torch.zeros(0)}
    got = {"a": torch.tensor([1.0, 1.0, 1.1]), "b": torch.tensor([10.0, 10.5]), "c": torch.zeros(0)}
    worst = difference(got, wanted)
    assert worst is not None
    assert (worst.parameter, worst.num_differing) == ("a", 2)
    assert worst.largest == pytest.approx(0.1, rel=1e-5)
    assert difference(wanted, wanted) is None


def test_a_value_that_is_not_a_number_is_infinitely_far_off():
    wanted = {"a": torch.ones(3), "b": torch.ones(3)}
    got = {"a": torch.full((3,), 2.0), "b": torch.tensor([1.0, float("nan"), 1.0])}
    worst = difference(got, wanted)
    assert worst is not None
    assert worst.parameter == "b"
    assert worst.relative == float("inf")


def test_the_doctor_measures_something_everywhere(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    machine = describe()
    total, free = memory_nbytes()
    assert 0 < free <= total
    names = {"copy", "launch", "call", "read", "write", "durable"}
    assert {name for name, rate in machine.rates.items() if rate.per_s > 0} == names
    assert machine.backends["gloo"]
    assert {check.name for check in checks(machine, None)} >= {
        "open files (ulimit -n)",
        "memory",
        "C kernel of AdamW",
    }
    assert not list(tmp_path.iterdir())


# the memory of the host


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_run_that_needs_more_memory_than_is_free_is_refused_before_it_fills_it(
    world_size, folder, monkeypatch
):
    """On every rank; with a byte more it runs."""

    def said(model: str, free: int) -> list[str]:
        job = Job(model=model, data=str(folder), rows=world_size, steps=1, sample=0, seq=16,
                  stage=0)  # fmt: skip
        has_free(monkeypatch, free)

        def body(rank: int) -> str:
            try:
                train(job, World(Group.from_handle(dist.group.WORLD), CPU), Notes())
            except ConfigError as error:
                return str(error)
            return ""

        return run_ranks(world_size, body)

    for line in said("tiny", 1 << 20):
        assert f" MiB of memory for each of {counted(world_size, 'rank')} of a host" in line
        assert f"got {format_bytes((1 << 20) // world_size)} free" in line
        assert "hint: `onefold plan --model tiny" in line
    module = unseeded_gpt()
    seen = trace(module, tokens_of(1, 16), loss=loss_of_rows)
    recipe = Recipe(stage=STAGES[0], world_size=world_size)
    needed = forecast(seen, recipe).memory_nbytes
    missing = needed - sum(parameter.nbytes for parameter in module.parameters())
    assert missing > 0
    assert said(UNSEEDED, missing * world_size) == [""] * world_size
    assert all(said(UNSEEDED, missing * world_size - 1))


def test_the_command_says_on_one_line_what_is_needed_and_what_is_free(folder, monkeypatch):
    has_free(monkeypatch, 1 << 20)
    done = onefold_command("train", "--data", str(folder), "--ranks", "2", "--seq", "16")
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if "512 KiB free" in line]
    assert lines
    assert "MiB of memory for each of 2 ranks of a host" in lines[0]
