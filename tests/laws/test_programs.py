"""Whatever a program combines, it is right or refused by name: 80 chosen seeds of the generator,
eight on many ranks, and the chosen ones on meshes of pipeline, data, sequence and tensor ranks.

They cover twice the pairs of values of the first sixty. `benchmarks/programs.py` runs thousands. A
seed that failed there becomes a law of its room.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch

from onefold.errors import ConfigError, WireError
from onefold.layout.message_plan import FEW_RANKS
from tests.support.forking import HANG_S
from tests.support.older_torch import offloads_adagrad
from tests.support.programs.catalogue import LATER_BLOCKS, POOL
from tests.support.programs.chosen import CHOSEN
from tests.support.programs.chosen_meshes import CHOSEN_MESHES
from tests.support.programs.drawing import Drawn, DrawnLeg, draw, draw_many, draw_trainer
from tests.support.programs.judging import Judge, judge_seed
from tests.support.programs.mesh_drawing import MeshDrawn, MeshJudge, draw_mesh
from tests.support.programs.meshes import AXES, EACH_ONE, EACH_TWO
from tests.support.programs.rounded import ROUNDED
from tests.support.programs.shrinking import shrink
from tests.support.programs.verdicts import Ended, Verdict, of_exception
from tests.support.ranks import run_ranks
from tests.support.rows import again_but

AGAIN = pytest.mark.again(
    "tests/laws/test_programs.py::test_drawn_programs_are_right_or_refused_by_name"
)
PARTS = [
    pytest.param(CHOSEN[first:end], id=f"{first}-{end}", marks=marks)
    for first, end, marks in ((0, 20, ()), (20, 50, AGAIN), (50, 80, AGAIN))
]
MOST_REFUSED = 0.25
ONE_STEP = Drawn(0, ("nn.Linear(8, 8)",), (DrawnLeg(2, (("stage", "3"),), ("train(p)",)),))


@pytest.mark.parametrize("seeds", PARTS)
def test_drawn_programs_are_right_or_refused_by_name(seeds):
    judge, kinds, defects = Judge(run_ranks), Counter[str](), list[str]()
    for seed in seeds:
        drawn, verdict = judge_seed(seed, judge)
        kinds[verdict.kind] += 1
        if verdict.is_defect:
            defects.append(f"seed {seed}: {verdict.kind}: {verdict.text}\n{drawn.text}")
    assert not defects, "\n".join(defects)
    assert kinds["refused"] <= MOST_REFUSED * len(seeds), kinds
    assert kinds["right"] > len(seeds) / 2, kinds


MANY = (112, 127, 139, 255, 259, 76, 222, 281)
"""Nodes, shares of weight 0, coarse messages, tiers, and checkpoints that 17 ranks leave to 2."""


@again_but("112", "127", "139", "255", "259")
@pytest.mark.parametrize("seed", MANY, ids=str)
def test_a_program_on_17_to_32_ranks_says_the_same_as_one_process(seed):
    drawn = draw_many(seed)
    assert max(leg.world_size for leg in drawn.legs) > FEW_RANKS
    assert Judge(run_ranks).judge(drawn, compares=seed % 2 == 0) == Verdict("right")


MESH_PARTS = [CHOSEN_MESHES[first : first + 6] for first in range(0, len(CHOSEN_MESHES), 6)]
"""Few programs a case: workers share them."""


@pytest.mark.parametrize("seeds", MESH_PARTS, ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
def test_one_process_says_the_same_as_every_mesh_or_it_is_refused_by_name(seeds):
    """Losses, norms, gradients, weights and moments; other stages of ZeRO have the same bits, and
    what a checkpoint brings to another mesh has those that were saved."""
    judge, kinds, defects = MeshJudge(run_ranks), Counter[str](), list[str]()
    for seed in seeds:
        drawn = draw_mesh(seed)
        verdict = judge.judge(drawn, compares=seed % 2 == 0)
        kinds[verdict.kind] += 1
        if verdict.kind not in ("right", "refused"):
            defects.append(f"seed {seed}: {verdict.kind}: {verdict.text}\n{drawn.text}")
    assert not defects, "\n".join(defects)
    assert kinds["refused"] <= len(seeds) // 2, kinds


def test_chosen_meshes_cut_by_every_axis_stage_and_schedule_and_move_between_meshes():
    drawn = [draw_mesh(seed) for seed in CHOSEN_MESHES]
    assert drawn == [draw_mesh(seed) for seed in CHOSEN_MESHES]
    for program in drawn[::4]:
        ast.parse(program.script())
    legs = [dict(leg.options) for program in drawn for leg in program.legs]
    for axis in AXES:
        assert {leg[axis] for leg in legs} == {"1", "2", "3"}, axis
    assert {leg["stage"] for leg in legs} == {"0", "1", "2", "3"}
    assert {leg["schedule"] for leg in legs if "schedule" in leg} == {
        repr(kind) for kind in (*EACH_ONE, *EACH_TWO)
    }
    meshes = [{tuple(dict(g.options)[a] for a in AXES) for g in p.legs} for p in drawn]
    assert sum(len(several) > 1 for several in meshes) >= 8


class Doubling(MeshJudge):
    """A judge whose ranks compute other gradients, or another loss, than one process."""

    def _run(self, drawn):
        notes = super()._run(drawn)
        return {name: value * (1 + 1e-3 * ("grad" in name)) for name, value in notes.items()}


def test_a_gradient_of_a_mesh_that_is_a_little_off_is_seen():
    options = {"pp": "1", "dp": "1", "cp": "2", "tp": "1", "stage": "3"}
    leg = DrawnLeg(2, tuple(options.items()), ("take_step(p)",))
    drawn = MeshDrawn(0, ("Looking(3)",), (leg,))
    assert MeshJudge(run_ranks).judge(drawn) == Verdict("right")
    assert Doubling(run_ranks).judge(drawn).kind == "wrong"


def test_a_seed_is_the_same_program_every_time_and_seeds_cover_worlds_and_stages():
    drawn = [draw(seed) for seed in range(300)]
    assert [draw(seed) for seed in range(0, 300, 5)] == drawn[::5]
    for program in drawn[::10]:
        ast.parse(program.script())
    legs = [leg for program in drawn for leg in program.legs]
    assert {leg.world_size for leg in legs} == {1, 2, 3, 4}
    assert {dict(leg.options)["stage"] for leg in legs} == {"0", "1", "2", "3"}
    later = [block for seed in range(POOL, POOL + 30) for block in draw(seed).blocks]
    assert {*later} & {*LATER_BLOCKS}
    assert {"stream", "islands", "tp", "wire", "offload", "shares", "units", "precision"} <= {
        name for leg in legs for name, _ in leg.options
    }


def test_trainer_programs_meet_every_stage_and_resume_with_both_classes():
    drawn = [draw_trainer(seed) for seed in range(60)]
    legs = [leg for program in drawn for leg in program.legs]
    assert {dict(leg.options)["stage"] for leg in legs} == {"0", "1", "2", "3"}
    assert {leg.world_size for leg in legs} == {1, 2, 3, 4}
    calls = [leg.operations[0] for leg in legs if "resumes=True" in leg.operations[0]]
    assert {"mixes=True" in call for call in calls} == {True, False}


def test_a_wrong_value_is_seen_on_one_rank_and_on_all():
    def shifted(ranks):
        def run(*args):
            notes = run_ranks(*args)
            for rank in ranks:
                name = next(name for name in notes[rank] if "grad" in name)
                notes[rank][name] = notes[rank][name] * 1.001
            return notes

        return run

    assert Judge(run_ranks).judge(ONE_STEP) == Verdict("right")
    for ranks in ([1], [0, 1]):
        assert Judge(shifted(ranks)).judge(ONE_STEP, compares=False).kind == "wrong"


def test_a_lossy_program_is_judged_by_what_rounding_makes_of_it():
    """Gradients that are 5 % off are no rounding; the bound was once as large as they are."""
    lossy = {
        "precision": '"bf16"',
        "wire": 'onefold.Wire(gradients="int8")',
    }
    for name, choice in lossy.items():
        leg = replace(ONE_STEP.legs[0], options=(("stage", "2"), (name, choice)))
        drawn = replace(ONE_STEP, blocks=("Residual()", "Residual()"), legs=(leg,))
        assert Judge(run_ranks).judge(drawn) == Verdict("right"), name
        assert Judge(off_by(1.05)).judge(drawn).kind == "wrong", name


def off_by(factor):
    def run(*args):
        notes = run_ranks(*args)
        for seen in notes:
            seen |= {name: value * factor for name, value in seen.items() if "grad" in name}
        return notes

    return run


@again_but("81827", "95519", "1101554")
@pytest.mark.parametrize(
    "drawn",
    [
        pytest.param(d, id=str(d.seed), marks=[offloads_adagrad] * ("Adagrad" in d.optimizer))
        for d in ROUNDED
    ],
)
def test_rounding_that_a_program_blows_up_is_no_defect(drawn):
    """int4 over an error that feedback kept; fp32 masters of a bfloat16 module; LBFGS that diverges
    after an edit, which ended what noise in initial weights would tell; a sign that Rprop looks
    at; sums and a mean in bfloat16 that cancel; frozen int8 weights, read at rest; a
    penalty on weights as an int8 wire brings them."""
    assert Judge(run_ranks).judge(drawn, drawn.seed % 2 == 0) == Verdict("right")


BRANCHES = replace(
    ONE_STEP,
    blocks=("Gated()",),
    legs=(DrawnLeg(3, (("stage", "3"), ("units", "[]")), ("train(p)", "train(p)")),),
)
WIRE = WireError("gather of unit 'one' on every rank", "another unit on rank 2", hint="one unit")


@pytest.mark.parametrize(
    ("blocks", "others", "kind"),
    [
        (("Gated()",), WIRE, "refused"),
        (("Residual()",), WIRE, "raw"),  # all ranks do the same
        (("Gated()",), None, "raw"),  # one rank ends well
        (("Gated()",), KeyError("x"), "raw"),
    ],
)
@pytest.mark.parametrize("first", [WIRE, AttributeError("of the threads' process group")], ids=str)
def test_an_error_of_the_wire_refuses_other_branches_if_every_rank_names_it(
    first, blocks, others, kind
):
    def fails(*args):
        raise first

    def ends(*args):
        verdicts = [of_exception(WIRE), others and of_exception(others), of_exception(WIRE)]
        raise Ended(verdicts[0], verdicts)

    drawn = replace(BRANCHES, blocks=blocks)
    assert Judge(fails, ends).judge(drawn).kind == kind


def test_an_error_is_a_refusal_only_with_what_was_expected_and_a_hint():
    named = ConfigError("a list", "3", hint="[3]")
    assert of_exception(named).kind == "refused"
    assert of_exception(ConfigError("no")).kind == "raw"
    assert of_exception(WireError("a rank", "none", hint="look")).kind == "raw"
    assert of_exception(KeyError("x")).kind == "raw"
    assert of_exception(TimeoutError("ranks [1] still run")).kind == "hang"


def test_the_shrinker_leaves_what_the_verdict_needs():
    drawn = next(d for d in map(draw, range(300)) if len(d.legs) > 1 and len(d.blocks) > 2)
    leg = replace(drawn.legs[-1], operations=(*drawn.legs[-1].operations, "edit_one(p, number=2)"))
    drawn = replace(drawn, legs=(*drawn.legs[:-1], leg))
    small = shrink(drawn, lambda d: any("edit_one(p" in c for x in d.legs for c in x.operations))
    assert len(small.blocks) == len(small.legs) == len(small.legs[0].operations) == 1
    assert small.legs[0].operations == ("edit_one(p)",)
    assert (small.legs[0].world_size, small.optimizer) == (1, ONE_STEP.optimizer)


def test_a_printed_script_holds_all_that_its_modules_need():
    for block in LATER_BLOCKS:
        names = {"__name__": __name__}
        exec(replace(ONE_STEP, blocks=(block,)).script(), names)
        assert names["program"].build()(torch.ones(2, 8)).shape == (2, 8), block


@pytest.mark.process
def test_a_printed_script_runs_by_itself(tmp_path):
    options = (("stage", "1"), ("offload", '"optimizer"'))
    legs = (replace(ONE_STEP.legs[0], world_size=3), DrawnLeg(2, options, ("train(p, clip=0.3)",)))
    path = tmp_path / "program.py"
    path.write_text(replace(ONE_STEP, blocks=("Packed()",), legs=legs).script())
    ended = subprocess.run(
        [sys.executable, path], capture_output=True, text=True, timeout=HANG_S, cwd=tmp_path
    )
    assert (ended.stdout, ended.returncode) == ("right\n", 0), ended.stderr
