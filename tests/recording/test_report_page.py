"""The page of a report: complete, self-contained, well-formed, right, and quiet in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import onefold
from onefold.app.cli.config_file import COPY
from onefold.planner.models.gpt import GPT, PRESETS
from onefold.recording.page import page, read_report, write_report
from onefold.recording.page_data import FIRST, MAX_POINTS, averaged, contents, report_of, view_of
from onefold.recording.run_report import RunReport, Training
from onefold.recording.step_record import KINDS, TORCH, VERBS, Change, SpanLine, StepRecord
from onefold.text import format_bytes, format_share
from tests.support import made_up
from tests.support.commands import onefold as command
from tests.support.forking import HANG_S
from tests.support.models import Model, next_token_loss, token_batches
from tests.support.ranks import run_ranks, seeded

SLOWER = 4
"""Machines of tests do other work as well; alone a page opens in a fraction of this."""

pytestmark = pytest.mark.timeout(120)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium, found none on PATH")


def recorded_step(rank):
    """A module of two ranks, and the record of its one step."""
    module = seeded(Model)
    optimizer = torch.optim.AdamW(module.parameters())
    onefold.shard(module, optimizer, stage=3)
    with onefold.record(module) as recording:
        next_token_loss(module, token_batches(1)[0].chunk(2)[rank]).backward()
        optimizer.step()
    return module, recording


def real_records() -> list[StepRecord]:
    """A step of two ranks."""
    return run_ranks(2, lambda rank: recorded_step(rank)[1].step)


RECORDS = {"made up": lambda: [made_up.record()], "real": real_records}
REPORTS = {
    "with a plan": lambda: made_up.report(plan=made_up.plan()),
    "with no more than a step": lambda: report_of([made_up.record()], about={}),
    "real": lambda: report_of(real_records(), about={"model": "blocks", "stage": 3}),
}


class Strict(HTMLParser):
    """Builds a tree of elements; every element but a void one must be closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.builder = ElementTree.TreeBuilder()
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        assert len(dict(attrs)) == len(attrs)
        self.builder.start(tag, {name: value or "" for name, value in attrs})
        if tag in ("meta", "link"):
            self.builder.end(tag)
        else:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        self.builder.end(tag)

    def handle_data(self, data):
        if self.open:
            self.builder.data(data)


def tree(text: str) -> ElementTree.Element:
    assert text.startswith("<!DOCTYPE html>\n")
    parser = Strict()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    return parser.builder.close()


def parsed(report: RunReport) -> ElementTree.Element:
    """The page as it lies in its file."""
    return tree(page(report))


def drawn(report: RunReport, folder: Path) -> ElementTree.Element:
    """The page as a browser has drawn it, without a word on the console."""
    write_report(folder, report, [])
    done = browse(folder, "--dump-dom")
    assert "CONSOLE" not in done.stderr
    return tree(done.stdout.replace("<!DOCTYPE html>", "<!DOCTYPE html>\n", 1).strip())


def text_of(node: ElementTree.Element) -> str:
    return "".join(node.itertext())


def with_class(root: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [node for node in root.iter() if name in node.get("class", "").split()]


def table_of(root: ElementTree.Element, section: str) -> dict[str, list[str]]:
    """The cells of a section's rows, by the row's heading."""
    (found,) = [node for node in root.iter("section") if node.get("id") == section]
    rows = [["".join(cell.itertext()) for cell in row] for row in found.iter("tr")]
    return {name: cells for name, *cells in rows}


@pytest.mark.parametrize("build", REPORTS.values(), ids=REPORTS)
def test_a_page_is_well_formed_and_refers_to_nothing_outside_itself(build):
    text = page(build())
    root = tree(text)
    for node in root.iter():
        assert "src" not in node.attrib
        assert "style" not in node.attrib
        for name in ("href", "data", "action", "poster"):
            assert node.attrib.get(name, "#").startswith(("#", "data:"))
    assert not re.search(r"https?:|//[a-z]|@import|url\(", text)
    assert not re.search(r"\{\{|\}\}", text.partition("<script")[0])


NAMES = (
    "</script>", "<!--", "<!--<script>", '"', "'", "&amp;", "{{data}}", "{{title}}", "\u2028", "\\",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_name_cannot_end_an_element_an_attribute_or_the_data(name):
    record = made_up.record()
    spans = tuple(replace(span, unit=name) for span in record.spans)
    named = replace(record, spans=spans)
    report = made_up.report(named, about={"model": name, name: name})
    root = parsed(report)
    assert root.findtext(".//h1") == f"{name}, 2 ranks"
    (data,) = [node for node in root.iter("script") if node.get("id") == "data"]
    assert json.loads(data.text or "") == json.loads(json.dumps(contents(report)))


def waiting(*shares: float) -> RunReport:
    """Ranks that wait for these shares of a step of a second; no step runs in the background."""
    records = [
        replace(made_up.record(), rank=rank, seconds=1.0, spans=(
            SpanLine("compute", "wait", "", 0.0, share, 0),
            SpanLine("compute", "forward", "", share, 1.0, 0),
        )) for rank, share in enumerate(shares)
    ]  # fmt: skip
    return made_up.report(*records)


def waits_on_rank_1(**changes: object) -> RunReport:
    """Rank 1 takes as long again, and waits."""
    own = made_up.record()
    wait = SpanLine("compute", "wait", "", own.seconds, 2 * own.seconds, 0)
    late = replace(own, rank=1, seconds=2 * own.seconds, spans=(*own.spans, wait))
    return made_up.report(own, late, **changes)


def test_a_sentence_says_how_long_the_step_waits_and_for_whom():
    assert waiting(0.34, 0.01).diagnosis == "34 % of the step waits: rank 0 for rank 1."
    assert waiting(0.1, 0.02, 0.5).diagnosis == "50 % of the step waits: rank 2 for rank 1."
    assert waiting(0.3, 0.4).diagnosis == (
        "40 % of the step waits: every rank for messages of the others."
    )
    assert waiting(0.3).diagnosis == ("30 % of the step waits: rank 0 for messages of the others.")
    assert waiting(0.01, 0.02).diagnosis == "The step computes: at most 2 % of it waits."
    # made up: 4 ms of waits for collectives, 8 ms for steps in the background
    assert (
        made_up.report().diagnosis == "12 % of the step waits for optimizer steps on another tier."
    )


def test_waits_for_another_tier_are_named_also_where_another_rank_than_0_waits():
    at_work, waits = (
        replace(made_up.record(), rank=rank, seconds=1.0, spans=(
            SpanLine("compute", verb, "", 0.0, 0.4, 0),
            SpanLine("compute", "forward", "", 0.4, 1.0, 0),
        )) for rank, verb in enumerate(("forward", "wait_step"))
    )  # fmt: skip
    report = made_up.report(at_work, waits)
    assert report.diagnosis == "40 % of the step waits for optimizer steps on another tier."


def test_the_page_opens_on_the_rank_that_its_headline_is_about():
    """A step that does not wait opens on rank 0."""
    for shares, opens in (((0.34, 0.01), 0), ((0.1, 0.02, 0.5), 2), ((0.3, 0.4), 1),
                          ((0.01, 0.02), 0)):  # fmt: skip
        report = waiting(*shares)
        assert contents(report)["opens"] == opens
        said = format_share(report.views[opens].line.wait_share)
        assert opens == 0 or report.diagnosis.startswith(said)


def test_a_unit_of_several_parameters_is_not_called_like_one_of_them():
    module = GPT(PRESETS["tiny"], 8)
    onefold.shard(module, units=list(module.blocks))
    names = {unit.name: unit.num_parameters for unit in onefold.report(module).units}
    own = dict(module.named_parameters())
    assert "tokens.weight and 1 more" in names
    for name, number in names.items():
        assert number == 1 or name not in own


@needs_chromium
def test_stage_0_is_drawn_beside_the_ranks(tmp_path):
    mib = made_up.MIB
    stage0 = {"weight": 40 * mib, "master": 0, "grad": 40 * mib, "optimizer": 80 * mib}
    report = made_up.report(stage0=stage0, about={"model": "blocks", "stage": 3})
    (figure,) = with_class(drawn(report, tmp_path), "ranks")
    line = report.ranks[0]
    peak, torch_nbytes = line.peak_nbytes, line.at_peak[TORCH]
    assert sum(line.at_peak.values()) == peak
    whole = 160 * mib + torch_nbytes
    texts = [text_of(node) for node in figure.iter("text")]
    assert texts[0] == f"stage 0{format_bytes(whole)}, computed"
    assert texts[1].endswith(f"{format_share(1 - peak / whole)} less than stage 0")
    widths = [float(node.get("width", "")[:-1]) for node in with_class(figure, "bar")]
    assert widths[:3] == pytest.approx([100 * n * mib / whole for n in (40, 80, 40)], abs=0.01)
    assert sum(widths[3:]) == pytest.approx(2 * 100 * peak / whole, abs=0.05)


def test_a_saved_recording_has_the_bytes_of_stage_0(tmp_path):
    def body(rank):
        module, recording = recorded_step(rank)
        recording.save(tmp_path / str(rank))
        return sum(parameter.numel() for parameter in module.parameters())

    numel = run_ranks(2, body)[0]
    stage0 = read_report(tmp_path / "1").stage0
    assert stage0["weight"] == stage0["grad"] >= 4 * numel
    assert stage0["optimizer"] == 2 * stage0["weight"]


@pytest.mark.parametrize("build", RECORDS.values(), ids=RECORDS)
def test_stacked_layers_sum_to_what_is_held_at_every_moment(build):
    record = build()[0]
    memory, stacks = record.memory, report_of([record], about={}).views[0].memory
    assert {stack["tier"] for stack in stacks} == {series.tier for series in record.series}
    for stack in stacks:
        held = memory.totals_of(record.indices(stack["tier"]))
        assert stack["times"] == pytest.approx(memory.times, abs=1e-7)
        assert [sum(column) for column in zip(*stack["layers"], strict=True)] == held
        assert stack["peaks"] == [max(layer) for layer in stack["layers"]]


@needs_chromium
def test_tables_have_the_numbers_and_the_words_of_the_report(tmp_path):
    record = replace(made_up.record(), modules={"blocks.0.up": 5, "blocks.1.up": 7, "head": 1})
    root = drawn(made_up.report(record, plan=made_up.plan()), tmp_path)
    held, sent = table_of(root, "memory"), table_of(root, "sent")
    assert held["all kinds, device memory"][0] == format_bytes(record.peaks["device"])
    assert held["all kinds, disk"][0] == format_bytes(record.peaks["disk"])
    weights = record.memory.nbytes[0]
    assert held[KINDS["weight"]][::2] == [format_bytes(max(weights)), format_bytes(weights[-1])]
    time = table_of(root, "timeline")
    assert time["gather of weights"] == ["4", "34.0 ms", "34 %", "4.00 MiB"]
    assert time["optimizer step, in the background"][:2] == ["4", "32.0 ms"]
    assert time["optimizer step"][:2] == ["1", "8.00 ms"]
    assert time["all together"] == ["6.80 ms", "6.8 %"]
    assert sent["weights (gather)"][:2] == ["8", "4.00 MiB"]
    assert sent["all collectives"][:2] == ["13", "12.0 MiB"]
    assert made_up.AWKWARD in sent, "names are text"
    assert table_of(root, "activations")["blocks.*.up"] == ["2", "12 B", ""]
    plan = table_of(root, "plan")
    assert plan["tomorrow"] == ["1 B", "0 B"]
    assert plan["all kinds, at the peak"] == ["40.0 MiB", "56.0 MiB"]
    assert table_of(root, "units")[made_up.AWKWARD][:3] == ["2", "786 k", "3.00 MiB"]
    figures = dict(zip(*([node.text for node in with_class(root, "figures")[0].iter(tag)][::step]
                         for tag, step in (("dt", 1), ("dd", 2))), strict=True))  # fmt: skip
    assert figures["recorded step"] == "100 ms"
    assert figures["speed"] == "10,240"
    assert figures["last loss"] == "0.938"
    for series in record.series:
        where = {"device": "", "cpu": ", CPU memory", "disk": ", disk"}[series.tier]
        assert KINDS[series.kind] + where in held
    assert {VERBS.get(s.verb, s.verb) for s in record.spans if s.stream != "phase"} <= {*time}
    style = next(root.iter("style")).text or ""
    assert all(f"--{word}:" in style for word in (*KINDS, *VERBS)), "each has a colour"


def test_a_thousand_times_as_many_moments_draw_no_more_columns_and_keep_the_peak():
    own = made_up.record()
    many = [Change(own.seconds * n / 50_000, n % 3, (n * 7919) % 100_003) for n in range(50_000)]
    record = replace(own, changes=tuple(many))
    report = made_up.report(record)
    (stack,) = report.views[0].memory
    assert len(stack["times"]) <= FIRST[0] + 1
    assert max(map(sum, zip(*stack["layers"], strict=True))) == record.peaks["device"]
    assert stack["peaks"] == [max(record.memory.nbytes[i]) for i in range(3)]
    assert [layer[-1] for layer in stack["layers"]] == [n[-1] for n in record.memory.nbytes[:3]]
    assert len(page(report)) < 600_000


def test_a_curve_of_many_steps_is_averaged_and_leaves_out_what_is_not_finite():
    assert averaged([3.0, None, float("nan"), 5.0]) == [(0, 3.0), (3, 5.0)]
    assert averaged([]) == []
    for steps in (MAX_POINTS, MAX_POINTS + 1, 10 * MAX_POINTS, 12_345):
        points = averaged([float(step) for step in range(steps)])
        assert len(points) <= MAX_POINTS
        assert all(x == y for x, y in points)


def test_the_predicted_line_stands_where_the_plans_units_were_computed():
    report = made_up.report(plan=made_up.plan())
    found = contents(report)["predicted"][0]
    spans = {(round(s.start, 7), round(s.stop, 7)): (s.verb, s.unit)
             for s in made_up.record().spans if s.verb != "wait"}  # fmt: skip
    assert [spans[start, stop] for start, stop, _ in found] == [
        *(("forward", unit) for unit in made_up.UNITS),
        *(("backward", unit) for unit in made_up.UNITS[::-1]),
        ("step", ""),
    ]
    assert found[1][2] == 21 * made_up.MIB
    assert contents(made_up.report())["predicted"] == {0: []}


def test_the_rank_that_the_page_opens_has_the_predicted_line_too():
    report = waits_on_rank_1(plan=made_up.plan())
    lines = contents(report)["predicted"]
    assert report.opens == 1
    assert lines[0] == lines[1] != []


# the command


def test_report_draws_the_page_again_and_prints_a_summary(tmp_path):
    write_report(tmp_path, made_up.report(plan=made_up.plan()), [made_up.record()])
    drawn = (tmp_path / "index.html").read_text()
    (tmp_path / "index.html").unlink()
    done = command("report", str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "index.html").read_text() == drawn
    assert "rank 1" in done.stdout
    assert "peak on disk" in done.stdout
    assert command("report", str(tmp_path), str(tmp_path / "none")).returncode == 2
    told = json.loads(command("report", str(tmp_path), "--json").stdout)
    assert told["page"] == str(tmp_path / "index.html")
    assert told["sent"]["gather"] == {"calls": 8, "nbytes": 4 * made_up.MIB}
    assert len(told["ranks"]) == 2


def test_a_page_is_drawn_without_torch(tmp_path):
    write_report(tmp_path, made_up.report(), [made_up.record()])
    code = (
        "import sys; from onefold.app.cli.main import main; "
        f"main(['report', {str(tmp_path)!r}, '--json']); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


DAMAGES = {
    "no file": (None, "report.json in"),
    "no JSON": ("{", "an undamaged"),
    "no object": ("[]", "an undamaged"),
    "no step": ('{"format": 1, "about": {}}', "no 'views'"),
    "another shape": ('{"format": 1, "about": [], "views": 3}', "an undamaged"),
    "a plan of another shape": (
        json.dumps({**made_up.report().as_json(), "plan": {"predicted": {"timeline": [1]}}}),
        "an undamaged",
    ),
    "a row that is a number": (
        json.dumps(
            {
                **made_up.report().as_json(),
                "views": [{**made_up.report().as_json()["views"][0], "times": [1]}],
            }
        ),
        "an undamaged",
    ),
    "a newer format": ('{"format": 2}', "format 2"),
    "a format that is none": ('{"format": "x"}', "an undamaged"),
}


@pytest.mark.parametrize(("text", "told"), DAMAGES.values(), ids=DAMAGES)
def test_what_is_no_report_is_one_line_and_exit_code_2(tmp_path, text, told):
    if text is not None:
        (tmp_path / "report.json").write_text(text)
    done = command("report", str(tmp_path))
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("onefold report: expected ")
    assert told in line
    assert "(hint: " in line


def test_a_report_that_cannot_be_written_is_refused_before_any_rank_starts(tmp_path):
    (tmp_path / "file").write_text("")
    done = command("train", "--steps", "1", "--report", str(tmp_path / "file"))
    assert done.returncode == 2
    assert "a directory to write a report to" in done.stderr


def test_train_writes_the_three_files_of_its_two_ranks(tmp_path):
    arguments = ["--steps", "4", "--batch", "4", "--seq", "16", "--sample", "0", "--json"]
    done = command("train", *arguments, "--report", str(tmp_path / "new" / "report"))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    folder = Path(told["report"]).parent
    files = ["index.html", "report.json", "trace.json"]
    assert sorted(p.name for p in folder.iterdir()) == [COPY, *files], "and its flags"
    report = read_report(folder)
    found = [(view.recorded, view.line.rank) for view in report.views]
    assert found == [(3, 0), (3, 1), (4, 0), (4, 1)]
    assert len(report.training.peaks if report.training else ()) == 4
    assert [line.rank for line in report.ranks] == [0, 1]
    assert report.training is not None
    assert len(report.training.losses) == len(report.training.seconds) == 4
    assert report.training.losses == pytest.approx(told["losses"], abs=1e-6)
    trace = json.loads((folder / "trace.json").read_text())
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 1}
    assert page(report) == (folder / "index.html").read_text()


def test_two_runs_of_one_model_are_compared_and_two_models_refused(tmp_path):
    first, units = made_up.report(), made_up.report().units
    slow = replace(made_up.record(), seconds=0.2)
    second = made_up.report(slow, slow, about={"model": "blocks"})
    other = made_up.report(units=(*units, *units))
    for name, report in (("a", first), ("b", second), ("c", other)):
        write_report(tmp_path / name, report, [])
    done = command("report", str(tmp_path / "a"), str(tmp_path / "b"))
    assert (done.returncode, done.stderr) == (0, "")
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("recorded step")]
    assert row.split() == ["recorded", "step", "101", "ms", "200", "ms", "+98", "%"]
    assert "first run: " in done.stdout
    assert (tmp_path / "b" / "compare.html").exists()
    refused = command("report", str(tmp_path / "a"), str(tmp_path / "c"))
    assert refused.returncode == 2
    assert "expected two runs of one model, got " in refused.stderr
    assert not (tmp_path / "c" / "compare.html").exists()


# in a browser


def browse(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    return subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--enable-logging=stderr", f"--user-data-dir={folder / 'profile'}", *flags,
            (folder / "index.html").as_uri(),
        ],
        capture_output=True, text=True, timeout=HANG_S, check=True,
    )  # fmt: skip


BROWSED = {
    **REPORTS,
    "with nothing seen": lambda: report_of(
        [replace(made_up.record(), spans=(), changes=(), sent={})], about={}
    ),
    "of rank 1, which waits": lambda: waits_on_rank_1(plan=made_up.plan()),
    "with one bad loss": lambda: made_up.report(training=Training(0, (None,), (), 1)),
}


@needs_chromium
@pytest.mark.parametrize("build", BROWSED.values(), ids=BROWSED)
def test_a_browser_draws_every_chart_with_words_for_screen_readers(tmp_path, build):
    report = build()
    root = drawn(report, tmp_path)
    charts = with_class(root, "chart")
    expected = bool(report.ranks[0].at_peak) + len(report.views[0].memory) + 1
    if report.training:
        expected += 1 + bool(report.training.seconds)
    assert len(charts) == expected
    for chart in charts:
        assert with_class(chart, "base")
        assert chart.get("role") == "img"
        assert [chart[0].tag, chart[1].tag] == ["title", "desc"]
        assert chart.get("aria-label") == f"{chart[0].text}: {chart[1].text}"
    predicted = bool(report.plan and report.plan.predicted.timeline)
    assert bool(with_class(root, "predicted")) == predicted
    assert ("predicted by the plan for rank 0" in text_of(root)) == (report.opens > 0 and predicted)
    ids = {node.get("id") for node in root.iter("section")}
    assert ("training" in ids) == bool(report.training)
    assert ("plan" in ids) == bool(report.plan)
    scripts = [node for node in root.iter("script") if node.get("type") is None]
    assert len(scripts) == 1, "a name became markup"


def large() -> RunReport:
    """A run of a thousand steps over 64 ranks, of which three steps are recorded."""
    own, units = made_up.record(), [f"blocks.{n}" for n in range(32)]
    spans = tuple(
        replace(span, unit=unit) for unit in units for span in own.spans if span.stream != "phase"
    )
    spans = tuple(span for span in own.spans if span.stream == "phase") + spans
    records = [replace(own, rank=rank, world_size=64, spans=spans) for rank in range(64)]
    others = [view_of(record, step) for step in (500, 1000) for record in records]
    training = Training(0, (2.0,) * 1000, (0.1,) * 1000, 1024, None, (2**30,) * 1000)
    return report_of(
        records, about={"model": "large", "stage": 3}, recorded=3, others=others, training=training
    )


CHOOSING = """<script>
addEventListener('load', () => {
  const [step, rank] = document.querySelectorAll('select'), found = {};
  const set = (menu, index) => {
    menu.selectedIndex = index;
    menu.dispatchEvent(new Event('change', {bubbles: true}));
  };
  const text = selector => document.querySelector(selector).textContent;
  found.opened_ms = performance.now();
  found.choices = [step.options.length, rank.options.length];
  set(rank, 63);
  set(step, 2);
  found.timeline = text('.timeline figcaption');
  found.summary = text('.figures .quiet');
  const bars = () => document.querySelectorAll('.timeline .bar').length;
  found.bars = [bars()];
  const buttons = document.querySelectorAll('button');
  for (const number of [0, 0, 3, 4]) {
    buttons[number].click();
    found.bars.push(bars());
  }
  const chart = document.querySelector('.timeline .chart'), box = chart.getBoundingClientRect();
  for (const [name, share] of [['pointerdown', .25], ['pointermove', .4], ['pointerup', .5]])
    chart.dispatchEvent(new PointerEvent(name,
      {clientX: box.left + share * box.width, pointerType: 'mouse', button: 0}));
  found.zoomed = text('.timeline figcaption');
  document.body.replaceChildren();
  document.body.append(Object.assign(document.createElement('pre'),
    {textContent: JSON.stringify(found)}));
});</script>"""


@needs_chromium
def test_a_thousand_steps_of_64_ranks_open_in_two_seconds_and_let_a_reader_choose(tmp_path):
    report = large()
    text = page(report)
    assert len(text) < 20e6
    (tmp_path / "index.html").write_text(text.replace("</body>", CHOOSING + "</body>"))
    done = browse(tmp_path, "--dump-dom")
    assert "CONSOLE" not in done.stderr
    found = json.loads(re.findall(r"<pre>(.*?)</pre>", done.stdout, re.DOTALL)[0])
    assert found["choices"] == [3, 64]
    assert found["timeline"].startswith("Rank 63 100 ms in ")
    assert found["summary"] == "number 1,000, rank 63"
    whole, half, quarter, moved, again = found["bars"]
    assert whole == again > half >= quarter > 0
    assert moved > 0
    assert found["zoomed"].startswith("Rank 63 25.0 ms from 25.0 ms, of 100 ms in ")
    assert found["opened_ms"] < 2000 * SLOWER


@needs_chromium
def test_a_comparison_is_drawn_with_both_runs(tmp_path):
    first = made_up.report()
    second = made_up.report(about={"model": "blocks", "stage": 3})
    write_report(tmp_path, second, [])
    (tmp_path / "index.html").write_text(page(second, first))
    done = browse(tmp_path, "--dump-dom")
    assert "CONSOLE" not in done.stderr
    root = tree(done.stdout.replace("<!DOCTYPE html>", "<!DOCTYPE html>\n", 1).strip())
    rows = table_of(root, "compared")
    assert rows["model"] == [made_up.AWKWARD, "blocks", ""]
    assert rows["recorded step"] == ["101 ms", "101 ms", ""]
    (compared,) = [node for node in root.iter("section") if node.get("id") == "compared"]
    assert len(with_class(compared, "other")) == 4  # two curves, with their legends


PROBE = """<!DOCTYPE html><html><body><iframe src="index.html" width="%d" height="900"></iframe>
<pre></pre><script>
function shown(within) {
  return [...within.querySelectorAll('text')]
    .filter(node => getComputedStyle(node).visibility === 'visible' &&
      getComputedStyle(node).display !== 'none')
    .map(node => ({text: node.textContent, box: node.getBoundingClientRect()}));
}
function overlaps(chart) {
  const texts = shown(chart);
  return texts.flatMap(({text, box: a}, i) => texts.slice(i + 1).filter(({box: b}) =>
    Math.min(a.right, b.right) > Math.max(a.left, b.left) + 1 &&
    Math.min(a.bottom, b.bottom) > Math.max(a.top, b.top) + 3)
    .map(other => `${text} and ${other.text}`));
}
const cut = page => shown(page).filter(({box}) => box.left < -1 ||
  box.right > page.documentElement.clientWidth + 1).map(({text}) => text);
addEventListener('load', () => {
  const inner = document.querySelector('iframe'), page = inner.contentDocument;
  const root = page.documentElement, chart = page.querySelector('.memory .chart');
  const box = chart.getBoundingClientRect(), line = page.querySelector('.readout');
  const wide = [...page.querySelectorAll('main *')].filter(node =>
    !node.closest('.wide') && !node.closest('svg') &&
    node.getBoundingClientRect().right > root.clientWidth + 1);
  chart.dispatchEvent(new inner.contentWindow.PointerEvent('pointermove',
    {clientX: box.left + box.width / 2, clientY: box.top + 50}));
  document.querySelector('pre').textContent = JSON.stringify({
    page: root.scrollWidth, room: root.clientWidth, chart: box.width, readout: line.textContent,
    wide: wide.map(node => node.outerHTML.slice(0, 90)),
    letters: Math.min(...[...page.querySelectorAll('body *')].map(
      node => parseFloat(getComputedStyle(node).fontSize))),
    overlaps: [...page.querySelectorAll('.chart')].flatMap(overlaps), cut: cut(page)});
});</script></body></html>"""


@needs_chromium
@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_is_cut_off_and_letters_stay_readable(tmp_path, width):
    write_report(tmp_path, made_up.report(plan=made_up.plan()), [made_up.record()])
    write_report(tmp_path / "inner", made_up.report(plan=made_up.plan()), [made_up.record()])
    (tmp_path / "inner" / "index.html").rename(tmp_path / "page.html")
    (tmp_path / "index.html").write_text((PROBE % width).replace("index.html", "page.html"))
    done = browse(tmp_path, "--dump-dom", "--allow-file-access-from-files")
    found = json.loads(re.findall(r"<pre>(.*?)</pre>", done.stdout, re.DOTALL)[0])
    assert "CONSOLE" not in done.stderr
    assert found["wide"] == []
    assert found["page"] <= found["room"]
    assert found["chart"] > 0.7 * found["room"]
    assert found["letters"] >= 12
    assert found["overlaps"] == []
    assert found["cut"] == []
    assert re.match(r"50\.\d ms: [\d.]+ MiB = ", found["readout"])


@needs_chromium
def test_it_prints_on_paper(tmp_path):
    write_report(tmp_path, made_up.report(plan=made_up.plan()), [made_up.record()])
    target = tmp_path / "page.pdf"
    browse(tmp_path, f"--print-to-pdf={target}", "--no-pdf-header-footer")
    pages = len(re.findall(rb"/Type\s*/Page\b", target.read_bytes()))
    assert 2 <= pages <= 7  # of three tiers, and all sections but one
