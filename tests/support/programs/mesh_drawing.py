"""Draw a program on a mesh by a seed: stages, data, sequence and tensor ranks; see meshes.py.

Two legs are on two meshes, and the second one goes on from the first one's checkpoint.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace
from itertools import product
from types import ModuleType
from typing import Any

from tests.support import mail as mail  # ranks of a pipeline send by it
from tests.support.programs import blocks, edits, mesh_blocks, meshes, optimizers
from tests.support.programs.catalogue import OFFLOADS, OPTIMIZERS, SCHEDULES, UNITS
from tests.support.programs.drawing import CARELESS, Drawn, DrawnLeg, Options
from tests.support.programs.judging import Judge
from tests.support.programs.meshes import AXES, EACH_ONE, EACH_TWO
from tests.support.programs.verdicts import Verdict

Sizes = tuple[int, int, int, int]

MOST_RANKS = 6
SHAPES: tuple[Sizes, ...] = tuple(
    shape for shape in product((1, 2, 3), repeat=4)
    if 2 <= shape[0] * shape[1] * shape[2] * shape[3] <= MOST_RANKS
)  # fmt: skip
"""Lengths of `AXES`."""

LAYERS = (
    "Looking(6)", "Looking(6)", "Looking(12, 6)", "Looking(6, bias=False)", "Widening(12)",
    "Widening(13)", "Widening(7, bias=False)", "Gating(10)", "Gating(9)", "Levelled()",
    "nn.Linear(8, 8)", "nn.Linear(8, 8).requires_grad_(False)", "Repeating(Widening(6))",
    "Repeating(Looking(6))", "Resting(Gating(6))", "Recomputed(Looking(6))",
    "Recomputed(Widening(11))", 'Normed("rms")', 'Normed("layer")',
)  # fmt: skip
REENTRANT = (
    "Recomputed(Widening(11), reentrant=True)", "Recomputed(Looking(12, 6), reentrant=True)",
)  # fmt: skip
OF_FEW_HEADS = ("Looking(4, 2)", "Looking(3)", "Looking(5, 1)", "Looking(1)", "Looking(2)")
"""Blocks whose heads tensor ranks cannot cut."""

SPLITTING = ("ZeroBubble", "DualPipeV")
"""Schedules with backwards in two parts: torch's split none of a weight that is used twice."""

STEPPERS = tuple(o for o in OPTIMIZERS if re.search("SGD|Adam|RMSprop|Adagrad|SignMom", o))
GROUPED = {"of_all": 6, "of_named": 1, "in_groups": 4}
EXACT = ("onefold.Precision(master=torch.float64)", "onefold.Precision(reduce=torch.float64)")
LOSSY = ('"bf16"', "onefold.Precision(compute=torch.bfloat16, reduce=torch.bfloat16)")
WINDOWS = ("0", "1", "'1 KiB'", "'1 TiB'")

CALLS: dict[str, float] = {
    "take_step": 14, "look": 2, "read_outputs": 1, "step_over": 1, "read_all": 1,
    "read_moments": 1, "freeze_part": 1.5, "skip_backward": 0.7, "save_and_restore": 1,
    "edit_whole": 0.7, "edit_all": 1, "change_rate": 0.7, "change_decay": 0.4, "hook_steps": 0.5,
}  # fmt: skip
ARGUMENTS: dict[str, dict[str, tuple[Any, ...]]] = {
    "take_step": {
        "parts": (1, 1, 2), "deferred": (True, True, False), "clip": (None, 0.1, 0.01),
        "norm_type": (2.0, 2.0, 1.0, float("inf")), "how": ("modules", "parameters", "torch"),
        "weighs": (False, True), "zero": (True, True, False, None),
    },
    "look": {"is_inference": (True, False)},
    "read_outputs": {"length": (6, 5, 4)},
    "step_over": {"length": (5, 4, 6)},
    "read_all": {"how": ("full_tensor", "unsharded", "full_state_dict")},
    "freeze_part": {"name": ("0", "1", "words"), "frozen": (True, True, False)},
    "edit_all": {"how": ("mul_", "clamp_", "add_", "copy_", "lerp_", "iadd", "data", "sub_")},
    "change_rate": {"factor": (0.5, 2.0)},
    "hook_steps": {"kind": ("pre", "post")},
}  # fmt: skip


@dataclass(frozen=True)
class MeshDrawn(Drawn):
    """See `meshes.MeshProgram`."""

    words: int = 12
    is_tied: bool = False

    @property
    def sources(self) -> tuple[ModuleType, ...]:
        return (mesh_blocks, meshes, blocks, edits, optimizers)

    @property
    def text(self) -> str:
        """The program alone, without what it is made of."""
        chain = "".join(f"        {block},\n" for block in self.blocks)
        schedule = f"lambda optimizer: {self.schedule}" if self.schedule else "None"
        legs = "".join(leg.text for leg in self.legs)
        return (
            f"def build():\n    return Net(\n{chain}        words={self.words},\n"
            f"        is_tied={self.is_tied},\n    )\n\n\n"
            f"program = MeshProgram(\n    build,\n    {self.groups}(lambda ps: {self.optimizer}),\n"
            f"    [\n{legs}    ],\n    schedule={schedule},\n    dtype=torch.{self.dtype},\n"
            f"    words={self.words},\n)\n"
        )

    def script(self) -> str:
        """A script to run at the root of the repository; its ranks are threads."""
        return (
            "from tests.support.programs.drawing import DrawnLeg\n"
            "from tests.support.programs.mesh_drawing import MeshDrawn, MeshJudge\n"
            f"from tests.support.ranks import run_ranks\n\ndrawn = {self!r}\n"
            "print(drawn.text, MeshJudge(run_ranks).judge(drawn))\n"
        )

    @property
    def sibling(self) -> MeshDrawn | None:
        """The same program at another stage, which has to give the same bits."""
        if self.is_lossy or any(has_other_sums(leg) for leg in self.legs):
            return None
        legs = tuple(replace(leg, options=at_other_stage(leg)) for leg in self.legs)
        return None if legs == self.legs else replace(self, legs=legs)


def has_other_sums(leg: DrawnLeg) -> bool:
    """True where stages add up in another order, or free gradients before anybody reads them."""
    options = dict(leg.options)
    if int(options["pp"]) > 1 and (options["stage"] == "2" or "window" in options):
        return True
    if "flat" in options or re.search("in_backward|tile", options.get("offload", "")):
        return True
    return any(re.search("parts|clip|zero|skip", call) for call in leg.operations)


def at_other_stage(leg: DrawnLeg) -> Options:
    """Stage 1 in place of 3, else stage 3; on the device."""
    stage = "1" if dict(leg.options)["stage"] == "3" else "3"
    kept = [option for option in leg.options if option[0] not in ("stage", "offload")]
    return (*kept, ("stage", stage))


class MeshJudge(Judge):
    """Judges programs on a mesh; ranks of it take the same branches."""

    def _sibling(self, drawn: Drawn) -> Drawn | None:
        return drawn.sibling if isinstance(drawn, MeshDrawn) else None

    def _looked_into(self, drawn: Drawn, verdict: Verdict) -> Verdict:
        return verdict


def draw_mesh(seed: int) -> MeshDrawn:
    """The program of a seed; the same in every process and on every machine."""
    r = random.Random(f"mesh {seed}")
    shapes = [r.choice(SHAPES) for _ in range(r.choices((1, 2), (4, 3))[0])]
    is_lossy = r.random() < 0.06
    precision = r.choice(LOSSY) if is_lossy else r.choice(EXACT) if r.random() < 0.1 else ""
    is_tied = r.random() < 0.2
    legs = tuple(draw_mesh_leg(r, shape, precision) for shape in shapes)
    kinds = LAYERS if any(shape[3] > 1 for shape in shapes) else (*LAYERS, *OF_FEW_HEADS)
    if all(shape[0] == 1 for shape in shapes):  # torch looks for shapes by gradients of inputs
        kinds += REENTRANT
    least = max(2 * shape[0] for shape in shapes) - 2  # stages of a rank have a part each
    if any(kind in leg.text for leg in legs for kind in SPLITTING):
        kinds = tuple(kind for kind in kinds if not kind.startswith("Repeating"))
    chosen = [r.choice(kinds) for _ in range(r.randint(max(1, least), max(3, least)))]
    if r.random() < 0.3:  # repeated blocks are units of the default cut
        chosen += [chosen[0]]
    if any(shape[2] > 1 for shape in shapes) and "Looking" not in "".join(chosen):
        chosen.append("Looking(6)")
    return MeshDrawn(
        seed, tuple(chosen), legs,
        r.choice(STEPPERS), r.choices(*zip(*GROUPED.items(), strict=True))[0],
        r.choice(SCHEDULES) if r.random() < 0.15 else "", None,
        "float64" if r.random() < 0.2 and not is_lossy else "float32",
        words=r.choice((12, 12, 13)), is_tied=is_tied,
    )  # fmt: skip


def draw_mesh_leg(r: random.Random, shape: Sizes, precision: str) -> DrawnLeg:
    pp, dp, cp, tp = shape
    stage, careless = r.choices((0, 1, 2, 3), (2, 3, 3, 5))[0], r.random() < CARELESS
    options = {axis: str(size) for axis, size in zip(AXES, shape, strict=True)}
    options["stage"] = str(stage)
    if precision:
        options["precision"] = precision
    if (stage or careless) and r.random() < 0.3:
        options["offload"] = r.choice([o for o, least in OFFLOADS if stage >= least or careless])
    if r.random() < 0.3:
        options["units"] = r.choice(UNITS)
    if dp > 1 and cp > 1 and r.random() < 0.4:
        options["flat"] = "False"
    elif (stage or careless) and dp * cp > 1 and r.random() < 0.08:
        options["shares"] = str([r.choice((0, 1, 2)) for _ in range(dp * cp - 1)] + [1])
    if cp > 1 and r.random() < 0.3:
        options["early"] = "True"
    scales = False
    if pp > 1:
        kind = r.choice((*EACH_ONE, *EACH_ONE, *EACH_TWO))
        options["schedule"] = repr(kind)
        micros = 2 * pp if kind in EACH_TWO else r.choice((2, 4))
        options["micros"] = str(micros if micros >= pp else 4)
        if stage == 3 and r.random() < 0.4:
            options["window"] = r.choice(WINDOWS)
        if scales := r.random() < 0.4:
            options["scales"] = "True"
    calls = [draw_call(r, pp, scales) for _ in range(r.randint(1, 3))]
    if not any(call.startswith("take_step") for call in calls):
        calls.insert(0, "take_step(p)")
    calls.append("read_moments(p)" if r.random() < 0.4 else "read_all(p, how='unsharded')")
    calls.append(f"read_all(p, how={r.choice(('full_tensor', 'full_state_dict'))!r})")
    return DrawnLeg(pp * dp * cp * tp, tuple(options.items()), tuple(calls))


def draw_call(r: random.Random, pp: int, scales: bool) -> str:
    """An operation and about half of its arguments.

    Whole outputs are those of one stage; and stages of torch keep the shape of their first step.
    """
    alone = ("read_outputs", "step_over")
    kept = {name: weight for name, weight in CALLS.items() if pp == 1 or name not in alone}
    (name,) = r.choices(*zip(*kept.items(), strict=True))
    arguments = {
        key: r.choice(several) for key, several in ARGUMENTS.get(name, {}).items()
        if r.random() < 0.5
    }  # fmt: skip
    if arguments.get("how") == "torch" and pp > 1:
        arguments["how"] = "modules"  # torch leaves out the other stages
    if scales:  # torch scales all that rests, and so an earlier part twice
        arguments = {k: v for k, v in arguments.items() if k not in ("parts", "zero")}
    text = "".join(f", {key}={value!r}" for key, value in arguments.items())
    return f"{name}(p{text})".replace("=inf", "=float('inf')")
