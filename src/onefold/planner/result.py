"""A plan: every way to train a model on a cluster, which ways fit, which one to take, and why.

It prints as a table, turns into plain dicts for JSON, and names the command and the line of Python
that carry it out.
"""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from onefold.fit.communicators import nbytes_of, words_of
from onefold.planner.bf16_weights import BF16Weights
from onefold.planner.models.gpt import PRESETS
from onefold.planner.planned_axes import ModelAxes
from onefold.planner.script import ON_MESH
from onefold.planner.search import Row, Search
from onefold.planner.show import (
    MixedPlan,
    axis_lines,
    html_of,
    memory_table,
    mesh_of,
    mesh_words,
    row_lines,
    sampler_of,
    short_table,
    traffic_table,
    wire_lines,
)
from onefold.text import counted, format_bytes, shell_lines, wrapped

FOLDER = "PATH"
"""Stands in commands for the folder of the disk tier."""
TIERS = {
    "none": "",
    "optimizer": " with the optimizer in CPU memory",
    "cpu": " with states and parameters in CPU memory",
    "disk": " with states and parameters on disk",
}
SIZE_FLAGS = {"host": "--host-mem", "disk": "--disk"}
"""Flags for the bytes of a place, which is not checked without them."""
WORDS = {"host": "free host memory", "disk": "free disk"}
PLACES = {"device": "", "host": " of host memory", "disk": " of disk"}


@dataclass(frozen=True, slots=True)
class Plan:
    """Ways to train, and the one to take.

    model, precision, recompute: the request, in the words of `onefold train`.
    search: the cluster and the traced model; it tries further rows.
    rows: the ways; `best` is the one to take, None where none fits; `closest` misses least.
    estimates: the parts of the plan that are not exact.
    wires: the way to take on every wire, exact and lossy, if the wire was left open.
    mixed: on several kinds of devices, the split of rows and states, and the equal one.
    name: the model's, as `onefold train` takes it; None: a module was passed.
    dtype: that of the weights, if it was requested.
    building, preparing: the lines of a script that make the model, and that make it ready for the
        last line.
    bf16_weights: what weights in bf16 would need; None where they save nothing.
    """

    model: str
    precision: str | None
    recompute: bool
    search: Search
    rows: tuple[Row, ...]
    best: Row | None
    closest: Row
    estimates: tuple[str, ...]
    wires: tuple[Row, ...] = ()
    mixed: MixedPlan | None = None
    name: str | None = None
    dtype: str | None = None
    building: tuple[str, ...] = ()
    preparing: tuple[str, ...] = ()
    bf16_weights: BF16Weights | None = None

    @property
    def numel(self) -> int:
        """Parameters of the model."""
        return self.search.one_row.numel

    @property
    def world_size(self) -> int:
        """Ranks of all nodes."""
        return self.search.recipe.world_size

    @property
    def machine(self) -> str:
        """The machine of step times, or several; empty where there are none."""
        if self.mixed is not None:
            has_times = self.mixed.split.step is not None
            return " + ".join(kind.name for kind in self.search.kinds) if has_times else ""
        return self.search.machine.name if self.search.machine else ""

    @property
    def _is_on_cpu(self) -> bool:
        return self.search.recipe.device_type == "cpu"

    @property
    def fits(self) -> bool:
        """True if there is a way."""
        return self.best is not None

    @property
    def taken(self) -> Row:
        """The way to take, or the one that misses least."""
        return self.best or self.closest

    @property
    def stage(self) -> int | None:
        """The stage of the way to take."""
        return None if self.best is None else self.best.stage

    @property
    def offload(self) -> str | None:
        """The tiers of the way to take, as `onefold.shard(offload=)` takes them."""
        word = self.taken.offload
        return None if word == "none" else f"disk:{FOLDER}" if word == "disk" else word

    def explain(self) -> list[str]:
        """Say which way fits first, how much the one before it misses, and what to do."""
        first = next((i for i, row in enumerate(self.rows) if row.fits), None)
        if first is None:
            lines = [f"nothing fits; the nearest: {_verdict(self.closest)}", _advice(self)]
        else:
            lines = ["; ".join(_verdict(row) for row in self.rows[max(0, first - 1) : first + 1])]
        if self.best is not None:
            speed, step = f"{self.best.tokens_per_s:,.0f} tokens/s", self.best.step
            fast = f"the fastest that fits ({speed}, bound by {step.bound})" if step else ""
            lines.append(f"take {_named_row(self.best)}: {fast or 'the simplest that fits'}")
            lines += [
                f"needs {format_bytes(nbytes)}{PLACES[place]} on each node: not checked without "
                f"{SIZE_FLAGS[place]}"
                for place, nbytes in self.best.unchecked.items()
            ]
            lines += _wire_notes(self.best)
        if self.bf16_weights is not None:
            how = "model.bfloat16()" if self.name is None else "--dtype bf16"
            lines.append(self.bf16_weights.line(how))
        return lines + [f"estimated, not exact: {part}" for part in self.estimates]

    @property
    def command(self) -> str:
        """The command that carries the plan out, on every node.

        Empty for a module that was passed, with model axes that `onefold train` has not, and on
        several kinds of devices.
        """
        return " ".join(self.command_words)

    @property
    def command_words(self) -> list[str]:
        """The parts between which `command` may be broken: flags with their values."""
        row, accumulate, recipe = self.taken, self.search.accumulate, self.search.recipe
        axes = row.composed.axes if row.composed is not None else ModelAxes()
        is_known = self.model in PRESETS and axes.ep == axes.virtual == 1
        trains = not axes.are_used or (is_known and accumulate >= axes.pp)
        if self.mixed is not None or not trains or self.name is None:
            return []
        ranks = recipe.local_world_size
        words = ["onefold train"]
        if recipe.nodes > 1:
            words = [
                *("torchrun", f"--nnodes {recipe.nodes}", "--node-rank 0", "--master-addr HOST"),
                *("--master-port 29500", f"--nproc-per-node {ranks}", "-m onefold train"),
            ]
        words += [f"--model {shlex.quote(self.name)}", f"--stage {row.stage}"]
        words += [f"--batch {row.rows}", f"--seq {self.search.tokens}"]
        words += [f"--dtype {self.dtype}"] * bool(self.dtype)
        words += [f"--precision {self.precision}"] * bool(self.precision)
        words += [f"--offload {self.offload}"] * bool(self.offload)
        words += [f"--wire {row.wire.name}"] * (row.wire.is_preset and not row.wire.wire.is_plain)
        words += [f"--accumulate {accumulate}"] * (accumulate > 1)
        words += ["--recompute"] * self.recompute
        words += [f"--{name} {size}" for name, size in axes.sizes.items() if size > 1]
        words += [f"--ranks {ranks}"] * (recipe.nodes == 1)
        return words

    @property
    def line(self) -> str:
        """The line of a script that shards the model; `script` has the lines before it, too."""
        row, options = self.taken, ""
        options += f', precision="{self.precision}"' if self.precision else ""
        options += f', offload="{self.offload}"' if self.offload else ""
        if not row.wire.wire.is_plain:
            name = row.wire.name
            options += f', wire="{name}"' if row.wire.is_preset else f", wire=onefold.{name}"
        if row.composed is not None:
            options += f", mesh={self._mesh[1]}"
        if self.mixed is not None and self.mixed.shares:
            options += f", shares={self.mixed.shares}"
        return f"onefold.shard(model, optimizer, stage={row.stage}{options})"

    @property
    def script(self) -> str:
        """The lines of a script, up to its loop, that carry the plan out with all it assumed.

        They end with `line`. With model axes they begin once these have cut the model. A module
        that was passed is `model` in them.
        """
        return "\n".join(self._script)

    @property
    def _script(self) -> list[str]:
        built, mesh = (*self.building, *self.preparing), list[str]()
        if self.taken.composed is not None:
            built, mesh = (*ON_MESH, *self.preparing), [f"mesh = {self._mesh[0]}"]
        return [*built, *mesh, self.line]

    @property
    def _mesh(self) -> tuple[str, str]:
        """The mesh of a composed run, and its data axis, as Python."""
        assert self.taken.composed is not None, "a mesh has model axes"
        sizes, device = mesh_of(self.taken.composed), self.search.recipe.device_type
        recipe = self.taken.forecast.recipe
        if recipe.has_axes:  # the wire has hops between nodes and inside
            near = recipe.local_world_size
            sizes |= {"nodes": recipe.world_size // near, "dp": near}
            sizes = {name: sizes[name] for name in ("pp", "nodes", "dp", "tp") if name in sizes}
        names = str(tuple(sizes)).replace("'", '"')
        data = 'mesh["cp"]' if "cp" in sizes else 'mesh["dp"]'
        if "cp" in sizes and sizes["dp"] > 1:
            data = 'mesh["dp", "cp"]._flatten("data")'
        data = 'mesh["nodes", "dp"]' if recipe.has_axes else data
        shape = tuple(sizes.values())
        return f'init_device_mesh("{device}", {shape}, mesh_dim_names={names})', data

    def as_dict(self) -> dict[str, Any]:
        """Return plain dicts and numbers, for JSON."""
        return {
            "model": self.model,
            "parameters": self.numel,
            "world_size": self.world_size,
            "fits": self.fits,
            "best": None if self.best is None else self.best.as_dict(),
            "rows": [row.as_dict() for row in self.rows],
            "wires": [row.as_dict() for row in self.wires],
            "explanation": self.explain(),
            "estimates": list(self.estimates),
            "machine": self.machine,
            "command": self.command,
            "line": self.line,
            "script": self.script,
            **({"mixed": self.mixed.as_dict()} if self.mixed else {}),
        }

    def __str__(self) -> str:
        return "\n".join(self.lines(is_wide=False))

    def __repr__(self) -> str:
        return f"<Plan: {self._heading()}; {self.explain()[0]}>"

    def _repr_html_(self) -> str:
        """Return the plan as HTML, as notebooks show it."""
        return html_of(self._heading(), self.rows, self.best, self.script)

    def lines(self, *, is_wide: bool) -> Iterator[str]:
        """Yield the text of the plan, in lines and tables."""
        yield from wrapped(self._heading())
        yield ""
        yield from short_table(self.rows, self.best)
        yield ""
        for note in self._notes():
            yield from wrapped(note)
        if is_wide:
            yield from memory_table(self.rows)
            yield from traffic_table(self.rows)
        else:
            speeds = "" if self._is_on_cpu else ", tokens/s, more devices"
            yield f"--wide: memory by kind, bytes sent{speeds}"
        yield ""
        for line in self.explain():
            yield from wrapped(line)
        yield from wire_lines(self.wires, self.taken, self.numel)
        if self.mixed is not None:
            yield from self.mixed.lines()
            *before, last = self._script
            yield from ("", "in a script:", *(f"  {line}".rstrip() for line in before))
            for line in filter(None, (last, sampler_of(self.mixed.split))):
                yield from wrapped(f"  {line}", "      ")
            yield from row_lines(self.mixed.split)
            return
        composed = self.taken.composed
        if composed is not None:
            yield from axis_lines(composed, self.taken.stage)
            names = [name for name, size in composed.axes.sizes.items() if size > 1]
            yield from ("", f"in a script, once {' and '.join(names)} cut the model:")
            *before, mesh, line = self._script
            yield from (f"  {line}".rstrip() for line in before)
            yield from wrapped(f"  {mesh}", "      ")
            yield f"  {line}"
            if self.command_words:
                yield "or:"
                yield from shell_lines(self.command_words)
            return
        yield ""
        if self.command_words:
            if self.search.recipe.nodes > 1:
                yield "on each node, with its own --node-rank; HOST is the address of node 0:"
            yield from shell_lines(self.command_words)
        yield "or in a script:" if self.command_words else "in a script:"
        yield from (f"  {line}".rstrip() for line in self._script)

    def _heading(self) -> str:
        search, nodes = self.search, self.search.recipe.nodes
        numbers = {row.rows for row in self.rows}
        rows = counted(numbers.pop(), "row") if len(numbers) == 1 else "as many rows as fit"
        where = f" on {nodes} nodes" if nodes > 1 else ""
        if self.mixed is not None:
            where = " on " + " + ".join(f"{kind.ranks}x{kind.name}" for kind in search.kinds)
        composed = self.taken.composed
        where += f" as {mesh_words(composed)}" if composed else ""
        cut = f" in each of {search.accumulate} micro-batches" if search.accumulate > 1 else ""
        return (
            f"{self.model}: {self.numel:,d} parameters, {counted(self.world_size, 'rank')}{where}, "
            f"{rows} of {search.tokens} tokens a rank{cut}{' in the mean' * bool(search.kinds)}"
        )

    def _notes(self) -> Iterator[str]:
        """Explain the columns of the table, and what would fill them."""
        has = format_bytes(self.search.room["device"])
        if self.mixed is not None:
            yield "memory: of the tightest device at the peak, with activations"
        else:
            yield f"memory: of one device at the peak, with activations; it has {has}"
        if sizes := self.taken.communicators:
            free = -self.taken.missing.get("device", 0)
            short = f"; only {format_bytes(free)} are free" if 0 <= free < nbytes_of(sizes) else ""
            yield f"{words_of(sizes)} of device memory, not counted above{short}"
        if self.taken.step:
            yield f"step: seconds of one optimizer step, on {self.machine}, from data sheets"
        elif not self._is_on_cpu:
            yield "step times: name a GPU, as in --gpu h100-80"
        places = {place for row in self.rows for place in row.unchecked}
        if places:
            flag_of = {place: flag for place, flag in SIZE_FLAGS.items() if place in places}
            flags = " and ".join(f"{flag} SIZE" for flag in flag_of.values())
            words = " and ".join(WORDS[place] for place in flag_of)
            yield f"if: it fits if each node has so much {words}, which was not checked: {flags}"


def _named_row(row: Row) -> str:
    return f"stage {row.stage}{TIERS[row.offload]}"


def _verdict(row: Row) -> str:
    short = {place: nbytes for place, nbytes in row.missing.items() if nbytes > 0}
    if short:
        missing = " and ".join(f"{format_bytes(n)}{PLACES[place]}" for place, n in short.items())
        return f"{_named_row(row)} does not fit by {missing}"
    return f"{_named_row(row)} fits with {format_bytes(-row.missing['device'])} free"


def _wire_notes(row: Row) -> list[str]:
    """Say where a wire differs from its name, rounds, or has none."""
    recipe, name = row.forecast.recipe, row.wire.name
    if row.wire.wire.is_plain:
        return []
    if recipe.nodes == 1 and recipe.wire.is_plain:
        return [f"wire {name} is the exact wire on a single node: no message leaves the node"]
    lines = [f"wire {name} rounds its messages: compare losses"] * row.wire.is_lossy
    if not row.wire.is_preset:
        lines.append("onefold train has no name for this wire; use the line of Python below")
    return lines


def _advice(plan: Plan) -> str:
    row = plan.closest
    if plan.mixed is not None:
        return f"rank {plan.mixed.split.tightest.kind.first} is the tightest; see below"
    helps = ["--precision bf16"] * (plan.precision is None)
    helps += ["--recompute"] * (not plan.recompute)
    helps += ["fewer rows in a micro-batch (--batch)"] * (row.rows > 1)
    ways = ", ".join([*helps, "more devices"])
    need, has = (format_bytes(sizes["device"]) for sizes in (row.needs, row.room))
    return f"it would need {need} on each device, which has {has}; {ways} help"
