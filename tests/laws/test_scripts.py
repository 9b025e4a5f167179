"""Scripts of the usual shapes have the losses of one process, and go on from their own files."""

from __future__ import annotations

import pytest

from tests.support.ranks import run_ranks
from tests.support.rows import again_but, worlds_in_turn
from tests.support.scripts import PROGRAMS, Run

CASES = [
    pytest.param(
        program, world_size, (number + world_size) % 4, id=f"{program.__name__}-{world_size}"
    )
    for number, program in enumerate(PROGRAMS)
    for world_size in (1, 2, 3)
]


@again_but("letters_by_micro_batches-1", "codes-1", "codes-3", "adversaries-2", "denoiser-2")
@worlds_in_turn
@pytest.mark.filterwarnings("ignore:torch.save of a sharded module")
@pytest.mark.parametrize(("program", "world_size", "stage"), CASES)
def test_a_script_has_the_losses_of_one_process_also_once_resumed(
    program, world_size, stage, tmp_path
):
    plain = Run(tmp_path)
    program(plain)

    def body(rank: int) -> list[float]:
        run = Run(tmp_path, stage, rank, world_size)
        program(run)
        return run.losses

    assert len(plain.losses) >= 4
    for losses in run_ranks(world_size, body):
        assert losses == pytest.approx(plain.losses, rel=2e-5)
