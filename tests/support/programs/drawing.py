"""Draw a program from the public surface by a seed, as expressions of Python; print it as a script.

Nothing here runs Onefold. A drawn program that plain torch cannot run is drawn again by judging.py.
"""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from tests.support.programs import blocks, edits, frame, operations, optimizers, trainer
from tests.support.programs.catalogue import (
    BLOCKS,
    GROUPS,
    LATER_BLOCKS,
    LOSSY_WIRES,
    OFFLOADS,
    OPERATIONS,
    OPTIMIZERS,
    POOL,
    PRECISIONS,
    SCHEDULES,
    SPLIT,
    STREAMED,
    STREAMS,
    TENSOR_PARALLEL,
    UNITS,
    WIRES,
    WRAPPERS,
)

SOURCES: Sequence[ModuleType] = (blocks, operations, edits, optimizers, trainer)
"""Files whose classes and functions a printed script takes over."""

WHOLE_COPIES = ("Coupled", "torch.optim.LBFGS")
"""Optimizers that step whole copies of the module: at stage 0 alone."""
NOT_IN_BLOCKS = (*WHOLE_COPIES, "Counting", "Normalized", "torch.optim.Muon",
                 "torch.optim.Adafactor")  # fmt: skip
"""Optimizers whose state does not leave the device."""
NOT_OF_BYTES = ("read_shapes", "read_weights", "edit_", "interpolate")
"""Operations that take the bytes of a quantized frozen weight for its values."""
REDRAWN = 1_000_003
"""Between the seed of a program that plain torch cannot run and that of the next one."""
CARELESS = 0.05
"""Share of the choices that the library has to refuse."""

Options = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class DrawnLeg:
    """See `frame.Leg`; options and operations are expressions."""

    world_size: int
    options: Options
    operations: tuple[str, ...]

    @property
    def text(self) -> str:
        options = ", ".join(f"{name!r}: {value}" for name, value in self.options)
        calls = "".join(f"            lambda p: {call},\n" for call in self.operations)
        return f"        Leg({self.world_size}, {{{options}}}, [\n{calls}        ]),\n"

    @property
    def is_lossy(self) -> bool:
        options = dict(self.options)
        return (
            options.get("wire", "None") in LOSSY_WIRES
            or "precision" in options
            or any("autocast" in call for call in self.operations)
        )


@dataclass(frozen=True)
class Drawn:
    """See `frame.Program`; everything is an expression."""

    seed: int
    blocks: tuple[str, ...]
    legs: tuple[DrawnLeg, ...]
    optimizer: str = "torch.optim.SGD(ps, lr=0.05)"
    groups: str = "of_all"
    schedule: str = ""
    decay: float | None = None
    dtype: str = "float32"
    tie: tuple[int, int] | None = None

    @property
    def sources(self) -> Sequence[ModuleType]:
        """Files whose classes and functions the text names."""
        return SOURCES

    @property
    def is_lossy(self) -> bool:
        return self.is_narrow or any(leg.is_lossy for leg in self.legs)

    @property
    def is_quantized(self) -> bool:
        """True if messages, or frozen weights, have 4 or 8 bits."""
        wires = [value for leg in self.legs for name, value in leg.options if name == "wire"]
        return bool(LOSSY_WIRES & set(wires)) or self.is_frozen_in_bytes

    @property
    def is_frozen_in_bytes(self) -> bool:
        """True if frozen weights rest as 8-bit numbers."""
        return any("frozen=" in value for leg in self.legs for _, value in leg.options)

    @property
    def is_narrow(self) -> bool:
        """True if plain torch rounds to bfloat16."""
        return self.dtype == "bfloat16" or any("bfloat16" in block for block in self.blocks)

    @property
    def text(self) -> str:
        """The program alone, without what it is made of."""
        tie = "" if self.tie is None else (
            f"    net.blocks[{self.tie[0]}].weight = net.blocks[{self.tie[1]}].weight\n"
        )  # fmt: skip
        chain = "".join(f"        {block},\n" for block in self.blocks)
        schedule = f"lambda optimizer: {self.schedule}" if self.schedule else "None"
        legs = "".join(leg.text for leg in self.legs)
        return (
            f"def build():\n    net = Chain(\n{chain}    )\n{tie}    return net\n\n\n"
            f"program = Program(\n    build,\n    {self.groups}(lambda ps: {self.optimizer}),\n"
            f"    [\n{legs}    ],\n    schedule={schedule},\n    decay={self.decay},\n"
            f"    dtype=torch.{self.dtype},\n)\n"
        )

    def program(self) -> frame.Program:
        """The program to run."""
        names: dict[str, Any] = {}
        for module in (frame, *self.sources):
            names |= vars(module)
        exec(compile(self.text, f"<seed {self.seed}>", "exec"), names)
        return names["program"]

    def script(self) -> str:
        """A script that runs by itself: `python script.py` starts its ranks as gloo processes."""
        head, _, body = inspect.getsource(frame).partition("import sys\n")
        more = (
            "import os\nimport torch.distributed.checkpoint.state_dict as dcp_state\n"
            "from collections import UserDict\nfrom contextlib import suppress\n"
            "from types import SimpleNamespace\nfrom torch.nn import functional as F\n"
            "from operator import attrgetter\nfrom torch.utils.checkpoint import "
            "checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts\n\n"
            "Make = Callable\n\n\n"
        )
        bound = 0.3 if self.is_lossy else 1e-4
        main = f'\n\nif __name__ == "__main__":\n    main(program, {bound})\n'
        sources = used_sources(self.text)
        return "".join([head, "import sys\n", body, "\n\n", more, *sources, self.text, main])


def used_sources(text: str) -> list[str]:
    """The source of every class and function that a text names, and of those that these name."""
    known = {
        name: value
        for module in SOURCES
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__
    }
    found: dict[str, str] = {}
    names = [text]
    while names:
        for word in re.findall(r"\w+", names.pop()):
            if word in known and word not in found:
                found[word] = inspect.getsource(known[word]) + "\n\n"
                names.append(found[word])
    return list(found.values())


def draw(seed: int) -> Drawn:
    """The program of a seed; the same in every process and on every machine."""
    return drawn_by(seed, draw_world, (30, 1, 1, 2))


def draw_many(seed: int) -> Drawn:
    """A program on more ranks than a message keeps lists of, most with fewer rows than ranks."""
    return drawn_by(seed, draw_many_ranks, (1, 0, 0, 0))


def drawn_by(
    seed: int, draw_world: Callable[[random.Random], int], weights: Sequence[int]
) -> Drawn:
    """`draw_world`: ranks of a leg; `weights`: of what is not training, streamed or split too."""
    r = random.Random(seed)
    kind = r.choices(("train", "stream", "islands", "tp"), weights)[0]
    kinds = BLOCKS if seed % REDRAWN < POOL else (*BLOCKS, *LATER_BLOCKS)
    chosen = draw_blocks(r, kinds)
    if kind != "train":
        return in_one_unit(draw_other(r, seed, kind, chosen))
    dtype = r.choices(("float32", "float64", "bfloat16"), (16, 3, 2))[0]
    optimizer, groups = r.choice(OPTIMIZERS), r.choices(*zip(*GROUPS.items(), strict=True))[0]
    num_legs = r.choices((1, 2, 3), (12, 5, 1))[0]
    worlds = [draw_world(r) for _ in range(num_legs)]
    legs = tuple(draw_leg(r, world, optimizer) for world in worlds)
    linears = [i for i, block in enumerate(chosen) if block.startswith("nn.Linear(8, 8")]
    tie = (linears[-1], linears[0]) if len(linears) > 1 and r.random() < 0.3 else None
    schedule = r.choice(SCHEDULES) if r.random() < 0.15 else ""
    decay = r.choice((0.5, 0.9)) if r.random() < 0.15 else None
    drawn = Drawn(seed, chosen, legs, optimizer, groups, schedule, decay, dtype, tie)
    return in_one_unit(buildable(drawn))


def buildable(drawn: Drawn) -> Drawn:
    """Torch 2.13 asks an orthogonal matrix for its numbers while it is built, also on `meta`."""
    if "orthogonal" not in "".join(drawn.blocks):
        return drawn
    legs = (replace(g, options=without(g.options, "meta")) for g in drawn.legs)
    return replace(drawn, legs=tuple(legs))


def in_one_unit(drawn: Drawn) -> Drawn:
    """Blocks that some ranks alone may use have to be inside one unit."""
    text = "".join(drawn.blocks)
    if "Gated" not in text and "Experts(" not in text.replace("Experts(2, dense=True)", ""):
        return drawn
    legs = (replace(g, options=(*without(g.options, "units"), ("units", "[]"))) for g in drawn.legs)
    return replace(drawn, legs=tuple(legs))


def without(options: Options, name: str) -> Options:
    return tuple(option for option in options if option[0] != name)


def draw_other(r: random.Random, seed: int, kind: str, chosen: tuple[str, ...]) -> Drawn:
    """A streamed module, islands that average, or layers that ranks split."""
    stage = str(r.choice((1, 2, 3)))
    reads = r.choice(("full_tensor", "unsharded"))
    if kind == "stream":
        world, options = r.choice((1, 2, 3)), {"stage": "3", "stream": r.choice(STREAMS)}
        calls = [r.choice(STREAMED) for _ in range(r.randint(1, 4))]
    elif kind == "islands":
        world, options = r.choice((2, 3, 4)), {"stage": stage}
        options["islands"] = str(2 if world == 4 else world)
        calls = ["train_on_islands(p)"] * r.randint(1, 3) + ["evaluate(p)"]
    else:
        world, options = r.choice((2, 4)), {"stage": stage, "tp": "2"}
        calls = ["train(p)", *(r.choice(TENSOR_PARALLEL) for _ in range(r.randint(1, 4)))]
        chosen = tuple(r.choice(SPLIT) for _ in range(r.randint(1, 3))) + SPLIT[:1]
    calls.append(f"read_weights(p, {reads!r})")
    leg = DrawnLeg(world, tuple(options.items()), tuple(calls))
    optimizer = "torch.optim.SGD(ps, lr=0.05)"
    if kind == "tp" and r.random() < 0.7:
        optimizer = r.choice([o for o in OPTIMIZERS if "AdamW" in o or "SGD" in o])
    return Drawn(seed, chosen, (leg,), optimizer)


def draw_trainer(seed: int) -> Drawn:
    """A program that trains with a `Trainer`, on ranks that are processes."""
    r = random.Random(seed)
    stage, world = r.choice((0, 1, 2, 3, 3)), draw_world(r)
    options = {"stage": str(stage), "trainer": "{}"}
    if stage and r.random() < 0.4:
        options["offload"] = r.choice([o for o, least in OFFLOADS if stage >= least])
    if r.random() < 0.2:
        options["units"] = r.choice(UNITS)
    call = trainer.draw_fit(r)
    if "adafactor" in call:
        options.pop("offload", "")
    calls = (
        call,
        f"read_weights(p, {r.choice(('full_tensor', 'unsharded', 'full_state_dict'))!r})",
    )
    chosen = tuple(r.choice(trainer.TRAINED) for _ in range(r.randint(1, 4)))
    leg = DrawnLeg(world, tuple(options.items()), calls)
    return Drawn(seed, chosen, (leg,), dtype=r.choices(("float32", "float64"), (3, 1))[0])


def draw_world(r: random.Random) -> int:
    return r.choices((1, 2, 3, 4), (3, 6, 5, 1))[0]


def draw_many_ranks(r: random.Random) -> int:
    """Mostly above `message_plan.FEW_RANKS`; others follow a checkpoint of many, or come before."""
    return r.choice((17, 18, 20, 23, 32)) if r.random() < 0.8 else draw_world(r)


def draw_blocks(r: random.Random, kinds: Sequence[str]) -> tuple[str, ...]:
    def block(depth: int) -> str:
        if depth < 2 and r.random() < 0.2:
            wrapper = r.choice(WRAPPERS)
            inner = ", ".join(block(depth + 1) for _ in range(2 if wrapper == "Chain({})" else 1))
            return wrapper.format(inner)
        return r.choice(kinds)

    several = [block(0) for _ in range(r.randint(1, 4))]
    if r.random() < 0.3:  # repeated blocks are units of the default cut
        several += [several[0]] * r.randint(1, 2)
    return tuple(several)


def draw_leg(r: random.Random, world: int, optimizer: str) -> DrawnLeg:
    options = draw_options(r, world)
    searches = "LBFGS" in optimizer
    if optimizer.startswith(WHOLE_COPIES) and r.random() > CARELESS:
        options = {"stage": "0"}
    elif optimizer.startswith(NOT_IN_BLOCKS) and r.random() > CARELESS:
        options.pop("offload", "")
    names, weights = zip(*((o, o.weight) for o in OPERATIONS), strict=True)
    calls: list[str] = []
    for _ in range(r.randint(2, 5)):
        operation = r.choices(names, weights)[0]
        if searches and operation.name.startswith(("train", "skip", "record", "save_and")):
            calls.append("train_by_closure(p)")
            continue
        if operation.name == "reshare" and options["stage"] == "0" and r.random() > CARELESS:
            continue
        arguments = operation.draw(r)
        calls.append(f"{operation.name}(p{arguments})")
    if not any(call.startswith("train") for call in calls):
        calls.insert(0, "train_by_closure(p)" if searches else "train(p)")
    calls.append("read_states(p)" if r.random() < 0.4 else "read_shapes(p)")
    how = ("full_tensor", "unsharded", "full_state_dict", "state_dict", "torch")
    calls.append(f"read_weights(p, {r.choice(how)!r})")
    if "frozen=" in options.get("precision", ""):  # such weights rest as bytes
        calls = [call for call in calls if not call.startswith(NOT_OF_BYTES)]
        calls.append("read_weights(p, 'unsharded')")
    return DrawnLeg(world, tuple(options.items()), tuple(calls))


def draw_options(r: random.Random, world: int) -> dict[str, str]:
    """Mostly choices that go together; some that the library has to refuse."""
    stage = r.choices((0, 1, 2, 3), (2, 3, 3, 5))[0]
    options = {"stage": str(stage)}
    careless = r.random() < CARELESS
    if r.random() < 0.12:
        options["precision"] = r.choice(PRECISIONS)
    if (stage or careless) and r.random() < 0.4:
        options["offload"] = r.choice([o for o, least in OFFLOADS if stage >= least or careless])
    if world > 3 and world % 2 == 0 and (stage or careless) and r.random() < 0.7:
        options["nodes"] = "2"
    if (stage or careless) and r.random() < 0.25:
        nodes = "nodes" in options
        kinds = [w for w, axes, stages in WIRES if careless or (stage in stages and axes == nodes)]
        if kinds:
            options["wire"] = r.choice(kinds)
    if r.random() < 0.35:
        options["units"] = r.choice(UNITS)
    if r.random() < 0.1:
        options["meta"] = r.choice(('"before"', '"after"'))
    if (stage or careless) and world > 1 and "nodes" not in options and r.random() < 0.12:
        options["shares"] = str([r.choice((0, 1, 1, 2, 3)) for _ in range(world - 1)] + [1])
    return options
