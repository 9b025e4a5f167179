"""`onefold.accumulate_layers` beside tensor, sequence and pipeline axes, in processes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import onefold
from tests.axes.test_sequence import VOCAB, Net, gradients, loss_sum
from tests.axes.test_tensor_parallel import Run, grads_of, weights_of
from tests.axes.test_tensor_parallel import rows as tokens_of
from tests.layered.test_layered import assert_same, loop
from tests.support.hf_ranks import run_forks
from tests.support.pipelines import MICROBATCHES, Pipe, mean_loss, mesh_of, rows
from tests.support.ranks import seeded
from tests.support.rows import again_but


def token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def cut_by_tensor_ranks(rank: int) -> dict[str, Any]:
    runs = [Run(2, 2, stage=3), Run(2, 2, stage=1)]
    for step in range(2):
        batches = [tokens_of(10 * step + number, 2)[runs[0].rank] for number in range(4)]
        losses = [onefold.accumulate_layers(runs[0].model, batches, token_loss)]
        losses.append(loop(runs[1].model, batches, token_loss))
        assert torch.equal(*losses)
        assert_same(*(grads_of(run.model) for run in runs))
        for run in runs:
            run.optimizer.step()
            run.optimizer.zero_grad()
    assert_same(*(weights_of(run.model) for run in runs))
    return facts(runs[0].model)


def facts(module: nn.Module) -> dict[str, Any]:
    report = onefold.report(module)
    calls = {name: traffic.calls for name, traffic in report.last_step.items()}
    return calls | {"units": len(report.units), "notes": " ".join(report.notes)}


def test_a_model_that_tensor_ranks_have_cut_runs_in_layers_with_the_bits_of_the_loop():
    for found in run_forks(4, cut_by_tensor_ranks):
        assert "'layers' order" in found["notes"]
        assert found["gather"] == 2 * found["units"] - 1
        assert found["reduce_scatter"] == found["units"]


def cut_by_sequence_ranks(rank: int, recompute: bool | None) -> dict[str, Any]:
    lengths = (12, 8, 11)  # the last one does not divide: it is padded

    def made(stage: int) -> tuple[nn.Module, Any, Any]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        model = seeded(partial(Net, recompute=recompute))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        onefold.shard(model, optimizer, stage=stage, mesh=mesh["dp", "cp"]._flatten("data"))
        return model, optimizer, onefold.split_sequence(model, mesh["cp"])

    runs = [made(3), made(1)]
    generator = torch.Generator().manual_seed(rank // 2)
    for _ in range(2):
        batches = [torch.randint(0, VOCAB, (2, n), generator=generator) for n in lengths]
        losses = []
        for (model, _, sequence), run in zip(runs, (onefold.accumulate_layers, loop), strict=True):
            count = sum(int((sequence.labels(each) != -100).sum()) for each in batches)

            def loss(
                logits: Tensor, tokens: Tensor, sequence: Any = sequence, count: int = count
            ) -> Tensor:
                return onefold.weigh(loss_sum(logits, sequence.labels(tokens)), count)

            losses.append(run(model, batches, loss))
        assert torch.equal(*losses)
        assert_same(*(gradients(model) for model, _, _ in runs))
        for _, optimizer, _ in runs:
            optimizer.step()
            optimizer.zero_grad()
    return facts(runs[0][0])


@again_but("False")
@pytest.mark.parametrize("recompute", [None, False])
def test_a_model_whose_sequences_are_split_runs_in_layers_with_the_bits_of_the_loop(recompute):
    for found in run_forks(4, cut_by_sequence_ranks, recompute):
        assert "'layers' order" in found["notes"]


class Unmasked(Net):
    """Its attention sees all positions."""

    def __init__(self) -> None:
        super().__init__(causal=False)


def padded_by_turns(rank: int) -> None:
    model: Any = seeded(Unmasked)
    onefold.shard(model)
    sequence = onefold.split_sequence(model)
    batches = [torch.zeros(1, n, dtype=torch.long) for n in (11, 12)]  # the first one is padded

    def loss(logits: Tensor, tokens: Tensor) -> Tensor:
        return loss_sum(logits, sequence.labels(tokens))

    with pytest.raises(onefold.StateError, match="1 of which are padding"):
        onefold.accumulate_layers(model, batches, loss)


def test_padding_of_one_micro_batch_is_not_taken_for_that_of_another():
    run_forks(2, padded_by_turns)


def refused_stage(rank: int) -> None:
    problems = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        with pytest.raises(onefold.StateError, match="no pipeline schedule runs") as error:
            onefold.accumulate_layers(pipe.modules[rank], [output.detach()], square)
        problems.append(error)
        return mean_loss(output, target)

    pipe = Pipe("1F1B", 3, mesh_of(2, 1), loss=loss)
    with pytest.raises(onefold.StateError, match="no pipeline schedule runs"):
        onefold.accumulate_layers(pipe.modules[rank], [rows(1)[0][0]] * MICROBATCHES, square)
    pipe.step(*rows(1))
    assert bool(problems) == (rank == 1), "the last stage has a loss"
    assert all(grad is not None for grad in pipe.grads().values())


def test_stages_of_a_pipeline_are_refused_before_and_inside_a_step():
    run_forks(2, refused_stage)


def square(output: Tensor, _: Any) -> Tensor:
    return output.square().mean()
