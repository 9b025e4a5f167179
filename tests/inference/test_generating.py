"""Laws of `onefold.generating`: weights stay unsharded over the forwards of a generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import DTensor

import onefold
from onefold.engine.policy import UnitFacts
from onefold.engine.registry import engine_of
from onefold.fit.kept_units import GatheredUnits
from onefold.layout.ledger import Kind
from tests.inference.test_generate import NEW, Prompts, built, ends_early, lengths_differ, plain
from tests.support.hf_ranks import run_forks
from tests.support.ranks import run_ranks, seeded
from tests.support.rows import again_but

PROMPT = torch.tensor([[4, 5, 6]])


def gathers(module: Any) -> int:
    traffic = onefold.report(module).traffic
    return traffic["gather"].calls if "gather" in traffic else 0


def unsharded_nbytes(module: Any) -> int:
    """Bytes of unsharded weights now."""
    usage = engine_of(module).ledger.usage.get((Kind.UNSHARDED, "device"))
    return usage.now if usage else 0


def deep_llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=44, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.5,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def counted(rank: int, budget: int | None) -> dict[str, Any]:
    """Gathers of one pass and of two generations, plain and kept; bytes; tokens."""
    module = onefold.shard(seeded(deep_llama).eval(), stage=3)
    found: dict[str, Any] = {"units": len(engine_of(module).units)}
    begun = gathers(module)
    with torch.no_grad():
        module(PROMPT)
    found["pass"] = gathers(module) - begun
    found["plain"] = plain(module, PROMPT)
    found["plain gathers"] = gathers(module) - begun - found["pass"]
    begun = gathers(module)
    with onefold.generating(module, budget):
        found["kept"] = plain(module, PROMPT), plain(module, PROMPT)
        found["nbytes"] = unsharded_nbytes(module)
        found["kept gathers"] = gathers(module) - begun
    found["left"] = unsharded_nbytes(module)
    report = onefold.report(module)
    found["peak"] = report.memory["unsharded"]["device"].peak
    found["predicted"] = report.predicted["unsharded"]
    found["all"] = report.total.peak, report.predicted["all"]
    found["facts"] = engine_of(module).schedule.units
    return found


@again_but("3")
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_generation_gathers_each_unit_once_where_all_fit(world_size):
    for found in run_ranks(world_size, counted, None):
        assert found["pass"] == found["units"]
        assert found["plain gathers"] == NEW * found["units"]
        assert found["kept gathers"] == found["units"], "of two generations"
        assert all(torch.equal(each, found["plain"]) for each in found["kept"])
        assert found["nbytes"] == sum(unit.nbytes for unit in found["facts"])
        assert found["left"] == 0
        assert found["peak"] == found["predicted"] == found["nbytes"]
        assert found["all"][0] <= found["all"][1]


def test_units_that_fit_are_kept_and_the_others_gathered_in_every_forward():
    whole = run_ranks(2, counted, None)[0]
    budget = whole["nbytes"] - min(unit.nbytes for unit in whole["facts"]) // 2
    found = run_ranks(2, counted, budget)[0]
    passes = 2 * NEW
    assert whole["kept gathers"] < found["kept gathers"] < passes * found["units"]
    kept = (passes * found["units"] - found["kept gathers"]) // (passes - 1)
    assert found["kept gathers"] == kept + passes * (found["units"] - kept)
    assert 0 < found["nbytes"] < found["peak"] <= found["predicted"] <= budget
    assert all(torch.equal(each, whole["plain"]) for each in found["kept"])
    nothing = run_ranks(2, counted, 0)[0]
    assert nothing["kept gathers"] == passes * nothing["units"]
    assert nothing["nbytes"] == 0


@given(
    sizes=st.lists(st.integers(1, 100), min_size=1, max_size=12), room=st.integers(0, 1000),
    ahead=st.integers(0, 3),
)  # fmt: skip
def test_kept_units_never_take_more_than_the_room(sizes, room, ahead):
    units = [UnitFacts(size, is_resident=size % 7 == 0, is_tiled=size % 11 == 0) for size in sizes]
    gathered = GatheredUnits.from_facts(units, ahead)
    kept = gathered.window(room)
    movable = {i for i, unit in enumerate(units) if not (unit.is_resident or unit.is_tiled)}
    assert kept <= movable
    assert not kept or gathered.most(kept) <= room
    if sum(units[i].nbytes for i in movable) <= room:
        assert kept == movable


def test_kept_units_lie_evenly_between_the_others():
    kept = GatheredUnits.from_facts([UnitFacts(1)] * 12, 1).window(9)
    assert kept == {0, 2, 4, 6, 8, 10}


# training goes on


def trained(rank: int, stage: int, folder: Path, *, generates: bool) -> list[Tensor]:
    """Losses, weights and states of a training with dropout, that generates on its way or not."""
    torch.manual_seed(rank)
    model = built("gpt2")
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.1
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    onefold.shard(model, optimizer, stage=stage)
    prompts, found = Prompts(rank), []
    for step in range(3):
        if generates:
            model.eval()
            with onefold.generating(model):
                lengths_differ(model, prompts)
                ends_early(model, prompts)
                with torch.no_grad():
                    model(prompts.pair, labels=prompts.pair)
                if step == 1:  # what ends the keeping, inside the block
                    onefold.save(folder / f"{stage}", model, optimizer)
                    assert unsharded_nbytes(model) == 0 or stage < 3
                    lengths_differ(model, prompts)
        model.train()
        loss = model(prompts.pair, labels=prompts.pair).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return (
        found
        + [own(each) for each in model.parameters()]
        + [own(value) for state in optimizer.state.values() for _, value in sorted(state.items())]
    )


def own(value: Any) -> Tensor:
    """This rank's part of a parameter or a state."""
    local = value.to_local() if isinstance(value, DTensor) else value
    return local.detach().clone()


def both(rank: int, folder: Path) -> list[tuple[int, bool]]:
    results = []
    for stage in (0, 1, 2, 3):
        plainly = trained(rank, stage, folder, generates=False)
        between = trained(rank, stage, folder, generates=True)
        same = len(plainly) == len(between) > 60 and all(map(torch.equal, plainly, between))
        results.append((stage, same))
    return results


def test_a_training_that_generates_between_its_steps_has_the_same_bits(tmp_path):
    for found in run_forks(2, both, tmp_path):
        assert found == [(stage, True) for stage in (0, 1, 2, 3)]


def ended(rank: int) -> None:
    model = built("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    onefold.shard(model, optimizer, stage=3)

    def looks() -> int:
        with torch.no_grad():
            model(PROMPT)
        return unsharded_nbytes(model)

    with onefold.generating(model):
        kept = looks()
        assert kept > 0
        optimizer.step()  # there are no gradients
        assert unsharded_nbytes(model) == 0
        assert looks() == kept
        model.load_state_dict(model.state_dict())
        assert unsharded_nbytes(model) == 0
        with onefold.generating(model, 0):  # the outer block decides
            assert looks() == kept
        assert unsharded_nbytes(model) == kept
        with onefold.unsharded(model):
            pass
        assert looks() == kept
        model(PROMPT).logits.sum().backward()
        assert unsharded_nbytes(model) == 0
        assert looks() == 0, "training has gone on"
    assert unsharded_nbytes(model) == 0


def test_kept_weights_are_freed_where_training_goes_on():
    run_ranks(2, ended)


def edited(rank: int) -> tuple[Tensor, Tensor]:
    model = onefold.shard(built("llama"), stage=3)
    with onefold.generating(model):
        before = plain(model, PROMPT)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(-1)
        after = plain(model, PROMPT)
    resident = built("llama")
    with torch.no_grad():
        for parameter in resident.parameters():
            parameter.mul_(-1)
    assert torch.equal(after, plain(resident, PROMPT))
    return before, after


def test_an_edit_of_kept_weights_is_seen():
    for before, after in run_ranks(2, edited):
        assert not torch.equal(before, after)


def refused(rank: int) -> None:
    model = onefold.shard(built("llama"), stage=3)

    def inside(*_: object) -> None:
        with onefold.generating(model):
            pass

    handle = model.model.register_forward_pre_hook(inside)
    with pytest.raises(onefold.StateError, match="outside forward and backward"):
        model(PROMPT)
    handle.remove()
    with onefold.generating(model, "1GiB"):
        plain(model, PROMPT)
        assert unsharded_nbytes(model) > 0
    for budget in (-1, "2 apples"):
        with (
            pytest.raises(onefold.ConfigError, match="budget"),
            onefold.generating(model, budget),
        ):
            pass
    with pytest.raises(KeyError), onefold.generating(model):
        plain(model, PROMPT)
        raise KeyError
    assert unsharded_nbytes(model) == 0


def test_a_block_in_a_forward_and_a_budget_that_is_none_are_named():
    run_ranks(2, refused)


def lowest(rank: int) -> int:
    model = onefold.shard(built("llama"), stage=3)
    with onefold.generating(model, 0 if rank else 2**30):
        plain(model, PROMPT)
        return unsharded_nbytes(model)


def test_the_rank_with_the_least_room_decides_for_all():
    assert run_ranks(2, lowest) == [0, 0]


# the Trainer's generations


class Count(transformers.TrainerCallback):
    """Gathers so far, at each event of an evaluation."""

    def __init__(self) -> None:
        self.at: dict[str, list[int]] = {}

    def _note(self, event: str, model: Any) -> None:
        self.at.setdefault(event, []).append(gathers(model))

    def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
        self._note("step", model)

    def on_prediction_step(self, *_: Any, model: Any, **__: Any) -> None:
        self._note("batch", model)

    def on_evaluate(self, *_: Any, model: Any, **__: Any) -> None:
        self._note("evaluated", model)

    def on_predict(self, *_: Any, model: Any, **__: Any) -> None:
        self._note("predicted", model)


def predicted(rank: int, folder: Path) -> None:
    draw = torch.Generator().manual_seed(2)
    pairs = [
        {"input_ids": torch.randint(2, 40, (6,), generator=draw),
         "labels": torch.randint(2, 40, (3,), generator=draw)}
        for _ in range(6)
    ]  # fmt: skip
    given = transformers.Seq2SeqTrainingArguments(
        output_dir=str(folder), max_steps=2, eval_strategy="steps", eval_steps=1, report_to="none",
        per_device_eval_batch_size=1, predict_with_generate=True, generation_max_length=6,
        use_cpu=True, save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    count = Count()
    trainer = transformers.Seq2SeqTrainer(
        model=built("t5"), args=given, train_dataset=pairs, eval_dataset=pairs,
        callbacks=[count, onefold.hf.Callback(stage=3)],
    )  # fmt: skip
    model, at = trainer.model, count.at
    units = len(engine_of(model).units)
    trainer.train()
    for step, evaluated in zip(at["step"], at["evaluated"], strict=True):
        assert evaluated - step == units, "three batches, each with a loss and five tokens"
    at["batch"].clear()
    trainer.predict(pairs)
    assert len(at["batch"]) == 3
    assert at["predicted"][0] - at["batch"][0] == units, "no event announces the first batch"
    assert unsharded_nbytes(model) == 0


def test_a_trainer_gathers_once_for_the_predictions_that_it_generates(tmp_path):
    pytest.importorskip("accelerate")
    run_forks(2, predicted, tmp_path)
