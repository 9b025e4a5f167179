"""Show a run of `onefold generate`: a heading, the text, then speed, bytes and a memory table."""

from __future__ import annotations

from collections.abc import Callable
from typing import TextIO

from onefold.app.cli.console import MAX_COLUMNS
from onefold.app.generate.request import GenerateJob
from onefold.app.generate.run import WARM_PASSES, Generated, Loaded
from onefold.app.generate.tokens import printable
from onefold.app.train.memory_table import TableRow, compared, rank_table
from onefold.text import counted, format_bytes, format_rate, format_share, wrapped

WORDS = {"unsharded": "unsharded, peak", "staging": "staging, peak", "wire": "wire, peak"}
"""Rows of the table besides weights at rest."""

MAX_NAMES = 8
"""Units that stay, by name; of more their number is enough."""


def heading(job: GenerateJob, loaded: Loaded, world_size: int) -> list[str]:
    """Describe the run that is about to start."""
    units = loaded.recipe.units
    kept = sum(unit.stays for unit in units)
    rest = {None: "exact", "int8": "in int8", "int4": "in int4"}[job.rest]
    tier = {"device": "on the device", "cpu": "in CPU memory", "disk": "on disk"}
    place = tier[loaded.recipe.offload.parameters]
    place = "in the model's own files" if loaded.recipe.reads_files else place
    budget = loaded.recipe.inference.budget if loaded.recipe.inference else 0
    lines = [
        f"{loaded.source.name}: {loaded.num_parameters:,d} parameters, weights rest {rest} "
        f"{place}" + (f", over {counted(world_size, 'rank')}" if world_size > 1 else ""),
        f"{kept} of {counted(len(units), 'unit')} stay within a budget of {format_bytes(budget)}; "
        f"prompt of {len(loaded.prompt):,d} {loaded.tokens.name}",
    ]
    lines += [f"note: {loaded.source.note}"] if loaded.source.note else []
    return [part for line in lines for part in wrapped(line)]


def writer(stream: TextIO) -> Callable[[str], None]:
    """Return a function that writes text at once, with characters that steer terminals escaped."""
    encoding = stream.encoding or "utf-8"

    def write(text: str) -> None:
        safe = printable(text).encode(encoding, "backslashreplace").decode(encoding)
        stream.write(safe)
        stream.flush()

    return write


def fact_lines(result: Generated) -> list[str]:
    """Return speed, bytes and memory, for people."""
    return ["", *_speed_lines(result), "", *_memory_table(result), *_stay_lines(result)]


def _speed_lines(result: Generated) -> list[str]:
    passes, link = result.passes, result.link
    lines = [
        f"{counted(result.num_tokens, 'token')} in {result.seconds:.2f} s: "
        f"{result.tokens_per_s:,.2f} tokens/s; the first pass took {result.first_seconds:.2f} s",
        f"{passes.number:,d} {'pass' if passes.number == 1 else 'passes'}, "
        f"{result.tokens_a_pass:.2f} tokens a pass",
    ]
    if passes.nbytes:
        rate = passes.nbytes / passes.seconds
        which = f"each pass after {WARM_PASSES}" if passes.is_warm else "on average a pass"
        lines[-1] += f"; {which} read {format_bytes(passes.nbytes)} a rank"
        lines.append(f"from {link.name}: {format_rate(rate)}")
        if link.rate:
            lines[-1] += (
                f", {format_share(link.share(passes))} of the {format_rate(link.rate)} measured"
            )
    else:
        lines[-1] += "; no weight moves"
    return [part for line in lines for part in wrapped(line)]


def _memory_table(result: Generated) -> list[str]:
    """List bytes by kind on each rank, as `onefold train` does."""
    memory = result.memory
    tiers = " and ".join(memory[0].tiers.get("weight", []))
    weights = [rank.held("weight") for rank in memory]
    rows: list[TableRow] = [(f"weight on {tiers}", weights, compared(memory, "weight"))]
    for kind, word in WORDS.items():
        peaks = [rank.peak.get(kind, 0) for rank in memory]
        rows += [(word, peaks)] if any(peaks) else []
    rows.append(("peak, no activations", [rank.total_peak for rank in memory]))
    rows.append(("peak of the process", [rank.resident_peak for rank in memory]))
    notes = [f"expected: the closed form; the budget for weights was {format_bytes(result.budget)}"]
    return rank_table(
        memory, rows, [*notes, *result.notes], heads=["expected"], most=MAX_COLUMNS,
        largest=max(rank.total_peak + rank.held("weight") for rank in memory[:MAX_COLUMNS]),
    )  # fmt: skip


def _stay_lines(result: Generated) -> list[str]:
    kept = len(result.stays)
    if kept in (0, result.num_units):
        word = "no unit stays" if kept == 0 else "all units stay"
        return [f"{word} on the device between passes"]
    names = ", ".join(result.stays[:MAX_NAMES]) + (", ..." if kept > MAX_NAMES else "")
    return wrapped(
        f"{kept} of {result.num_units} units stay, {format_bytes(result.stay_nbytes)}: {names}"
    )
