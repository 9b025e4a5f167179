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
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import onefold
from onefold.errors import ConfigError
from onefold.recording.charts import MAX_COLUMNS, MAX_POINTS, averaged, memory_stacks
from onefold.recording.files import read, write
from onefold.recording.page import page
from onefold.recording.run_report import PlanLines, RunReport, Training
from onefold.recording.step_record import Change
from onefold.recording.words import (
    KINDS,
    VERBS,
    format_bytes,
    format_count,
    format_loss,
    format_seconds,
    format_share,
)
from tests import made_up
from tests.commands import onefold as command
from tests.forking import HANG_S
from tests.models import Model, next_token_loss, token_batches
from tests.ranks import run_ranks, seeded

pytestmark = pytest.mark.timeout(120)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium, found none on PATH")


def real_report() -> RunReport:
    """A step of two ranks."""

    def body(rank):
        module = seeded(Model)
        optimizer = torch.optim.AdamW(module.parameters())
        onefold.shard(module, optimizer, stage=3)
        with onefold.record(module) as recording:
            next_token_loss(module, token_batches(1)[0].chunk(2)[rank]).backward()
            optimizer.step()
        return recording.step

    return RunReport.of(run_ranks(2, body), about={"model": "blocks", "stage": 3})


REPORTS = {
    "made up": made_up.report,
    "with a plan": lambda: made_up.report(plan=made_up.plan()),
    "with no more than a step": lambda: RunReport.of([made_up.record()], about={}),
    "real": real_report,
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
    return tree(page(report))


def charts(report: RunReport) -> list[dict[str, Any]]:
    """What the page's script draws, read as the script reads it."""
    (data,) = [node for node in parsed(report).iter("script") if node.get("id") == "charts"]
    return json.loads(data.text or "")


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


@pytest.mark.parametrize("build", REPORTS.values(), ids=REPORTS)
def test_every_chart_has_a_title_a_description_and_words_for_screen_readers(build):
    report = build()
    drawn = [node for node in parsed(report).iter("svg") if node.get("role") == "img"]
    assert len(drawn) == len(charts(report)) >= 2
    for chart in drawn:
        assert chart[0].tag == "title"
        assert chart[0].text
        assert chart[1].tag == "desc"
        assert chart[1].text
        assert chart.get("aria-label")


def test_names_are_text_whatever_they_are():
    report = made_up.report(plan=made_up.plan())
    root = parsed(report)
    words = "".join(root.itertext())
    assert made_up.AWKWARD in words
    scripts = [node for node in root.iter("script") if node.get("type") is None]
    assert len(scripts) == 1
    assert "alert" not in (scripts[0].text or "")
    (timeline,) = [chart for chart in charts(report) if chart["kind"] == "timeline"]
    labels = {bar[3] for lane in timeline["lanes"] for bar in lane["bars"]}
    assert made_up.AWKWARD in labels


@pytest.mark.parametrize(
    "name", ["</script>", "<!--", "<!--<script>", '"', "'", "&amp;", "{{units}}", "\u2028", "\\"]
)
def test_a_name_cannot_end_an_element_an_attribute_or_the_data(name):
    record = made_up.record()
    spans = tuple(replace(span, unit=name) for span in record.spans)
    report = made_up.report(about={"model": name, name: name}, step=replace(record, spans=spans))
    root = parsed(report)
    assert root.findtext(".//h1") == name
    assert name in [node.text for node in root.iter("dt")]
    (timeline,) = [chart for chart in charts(report) if chart["kind"] == "timeline"]
    assert name in {bar[3] for lane in timeline["lanes"] for bar in lane["bars"]}


def test_every_kind_and_verb_that_occurs_has_its_words_beside_its_colour():
    report = made_up.report()
    root = parsed(report)
    told = {"".join(row.itertext()) for row in root.iter("th") if row.get("scope") == "row"}
    for series in report.step.series:
        where = {"device": "", "cpu": ", CPU memory", "disk": ", disk"}[series.tier]
        assert KINDS[series.kind] + where in told
    for span in report.step.spans:
        if span.stream != "phase":
            assert VERBS.get(span.verb, span.verb) in told
    keys = [node.get("class", "") for node in root.iter("span") if "key" in node.get("class", "")]
    style = next(root.iter("style")).text or ""
    assert len(keys) > 10
    for key in {*keys, *(f"key {word}" for word in (*KINDS, *VERBS))}:
        assert re.search(rf"\.{key.split()[1]}[,{{]", style)
    drawn = [chart for chart in charts(report) if chart["kind"] == "memory"]
    names = dict(zip(drawn[0]["colours"], drawn[0]["names"], strict=True))
    assert names == {s.kind: KINDS[s.kind] for s in report.step.series if s.tier == "device"}


@pytest.mark.parametrize("build", REPORTS.values(), ids=REPORTS)
def test_stacked_layers_sum_to_what_is_held_at_every_moment(build):
    report = build()
    record = report.step
    memory = record.memory
    stacks = memory_stacks(record)
    drawn = [chart for chart in charts(report) if chart["kind"] == "memory"]
    assert len(drawn) == len(stacks)
    for stack, chart in zip(stacks, drawn, strict=True):
        indices = [i for i, series in enumerate(record.series) if series.tier == stack.tier]
        held = [sum(memory.nbytes[i][m] for i in indices) for m in range(len(memory.times))]
        assert stack.totals == held
        assert chart["times"] == list(memory.times)
        assert [sum(column) for column in zip(*chart["layers"], strict=True)] == held


def test_tables_have_the_numbers_of_the_report():
    report = made_up.report(plan=made_up.plan())
    root = parsed(report)
    held = table_of(root, "memory")
    assert held["all kinds, device memory"][0] == format_bytes(report.step.peaks["device"])
    assert held["all kinds, disk"][0] == format_bytes(report.step.peaks["disk"])
    weights = report.step.memory.nbytes[0]
    assert held[KINDS["weight"]][::2] == [format_bytes(max(weights)), format_bytes(weights[-1])]
    time = table_of(root, "timeline")
    assert time["gather of weights"] == ["4", "34.0 ms", "34 %", "4.00 MiB"]
    assert time["optimizer step, in the background"][:2] == ["4", "32.0 ms"]
    assert time["optimizer step"][:2] == ["1", "8.00 ms"]
    sent = table_of(root, "sent")
    assert sent["weights (gather)"][:2] == ["8", "4.00 MiB"]
    assert sent["all collectives"][:2] == ["13", "12.0 MiB"]
    assert table_of(root, "ranks")["rank 1"][0] == "101 ms"
    assert table_of(root, "ranks")["rank 1"][5] == "3.00 GiB"
    plan = table_of(root, "plan")
    assert plan["tomorrow"] == ["1 bytes", "0 bytes"]
    assert plan["all kinds, at the peak"] == ["40.0 MiB", "50.0 MiB"]
    assert table_of(root, "units")[made_up.AWKWARD][:3] == ["2", "786 k", "3.00 MiB"]
    facts = dict(zip((n.text for n in root.iter("dt")), (n.text for n in root.iter("dd")),
                     strict=False))  # fmt: skip
    assert {"cores", "memory", "onefold", "stage"} <= facts.keys()


def test_sections_without_content_are_left_out():
    whole = {node.get("id") for node in parsed(made_up.report(plan=made_up.plan())).iter("section")}
    bare = {
        node.get("id") for node in parsed(REPORTS["with no more than a step"]()).iter("section")
    }
    assert whole == bare | {"training", "ranks", "plan", "units", "facts"}


def test_a_thousand_times_as_many_moments_draw_no_more_columns_and_keep_the_peak():
    own = made_up.record()
    many = [Change(own.seconds * n / 50_000, n % 3, (n * 7919) % 100_003) for n in range(50_000)]
    record = replace(own, changes=tuple(many))
    report = made_up.report(step=record)
    (chart,) = [chart for chart in charts(report) if chart["kind"] == "memory"]
    assert len(chart["times"]) <= MAX_COLUMNS + 1
    assert max(map(sum, zip(*chart["layers"], strict=True))) == record.peaks["device"]
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
    first, *others = [chart for chart in charts(report) if chart["kind"] == "memory"]
    assert [chart["predicted"] for chart in others] == [[], []]
    found = first["predicted"]
    spans = {(s.start, s.stop): (s.verb, s.unit) for s in report.step.spans if s.verb != "wait"}
    assert [spans[start, stop] for start, stop, _ in found] == [
        *(("forward", unit) for unit in made_up.UNITS),
        *(("backward", unit) for unit in made_up.UNITS[::-1]),
        ("step", ""),
    ]
    assert found[1][2] == 21 * made_up.MIB
    assert charts(made_up.report())[0]["predicted"] == []


def test_a_plan_with_no_prediction_leaves_the_line_out():
    report = made_up.report(plan=PlanLines(stage=2))
    assert charts(report)[0]["predicted"] == []
    assert "Chosen: stage 2." in page(report)


def test_numbers_have_units():
    assert [format_bytes(n) for n in (0, 1023, 1024, 1536, 2**20, 5.25 * 2**30, 2**50)] == [
        "0 bytes", "1,023 bytes", "1.00 KiB", "1.50 KiB", "1.00 MiB", "5.25 GiB", "1,024 TiB",
    ]  # fmt: skip
    assert [format_seconds(s) for s in (0, 2.5e-6, 0.0123, 1.5, 100)] == [
        "0 ms", "2.50 \N{MICRO SIGN}s", "12.3 ms", "1.50 s", "100 s",
    ]  # fmt: skip
    assert [format_count(n) for n in (7, 99_999, 123_456, 4_872_704)] == [
        "7", "99,999", "123 k", "4.87 M",
    ]  # fmt: skip
    assert [format_share(s) for s in (0, 0.017, 0.5, 1)] == ["0 %", "1.7 %", "50 %", "100 %"]
    assert [format_loss(loss) for loss in (1.23456, None, float("inf"))] == [
        "1.235",
        "\u2013",
        "\u2013",
    ]


# the command


def test_report_draws_the_page_again_and_prints_a_summary(tmp_path):
    write(tmp_path, made_up.report(plan=made_up.plan()), [made_up.record()])
    drawn = (tmp_path / "index.html").read_text()
    (tmp_path / "index.html").unlink()
    done = command("report", str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "index.html").read_text() == drawn
    assert "rank 1" in done.stdout
    assert "peak bytes, disk" in done.stdout
    told = json.loads(command("report", str(tmp_path), "--json").stdout)
    assert told["page"] == str(tmp_path / "index.html")
    assert told["sent"]["gather"] == {"calls": 8, "nbytes": 4 * made_up.MIB}
    assert len(told["ranks"]) == 2


def test_a_page_is_drawn_without_torch(tmp_path):
    write(tmp_path, made_up.report(), [made_up.record()])
    code = (
        "import sys; from onefold.cli.main import main; "
        f"main(['report', {str(tmp_path)!r}, '--json']); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


DAMAGES = {
    "no file": (None, "report.json in"),
    "no JSON": ("{", "an undamaged"),
    "no object": ("[]", "an undamaged"),
    "no step": ('{"format": 1, "about": {}}', "no 'step'"),
    "another shape": ('{"format": 1, "about": [], "step": 3}', "an undamaged"),
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


DAMAGED_PLANS = {
    "a timeline of numbers": {"predicted": {"timeline": [1, 2]}},
    "no phase": {"predicted": {"timeline": [{"unit": "x", "nbytes_by_kind": {}}]}},
    "bytes that are words": {"predicted": {"by_kind": {"weight": "many"}}},
    "a list": [],
}


@pytest.mark.parametrize("plan", DAMAGED_PLANS.values(), ids=DAMAGED_PLANS)
def test_a_plan_that_cannot_be_read_is_one_line_too(tmp_path, plan):
    told = {**made_up.report().as_json(), "plan": plan}
    (tmp_path / "report.json").write_text(json.dumps(told))
    with pytest.raises(ConfigError, match="an undamaged"):
        read(tmp_path)


def test_a_step_in_which_nothing_was_seen_has_a_page_too():
    empty = replace(made_up.record(), spans=(), changes=(), sent={})
    assert "Nothing: a world of one" in page(RunReport.of([empty], about={}))


def test_train_writes_the_three_files_of_its_two_ranks(tmp_path):
    arguments = ["--steps", "4", "--batch", "4", "--seq", "16", "--sample", "0", "--json"]
    done = command("train", *arguments, "--report", str(tmp_path / "new" / "report"))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    folder = Path(told["report"]).parent
    assert sorted(p.name for p in folder.iterdir()) == ["index.html", "report.json", "trace.json"]
    report = read(folder)
    assert report.recorded == 3
    assert [line.rank for line in report.ranks] == [0, 1]
    assert report.training is not None
    assert len(report.training.losses) == len(report.training.seconds) == 4
    assert report.training.losses == pytest.approx(told["losses"], abs=1e-6)
    trace = json.loads((folder / "trace.json").read_text())
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 1}
    assert page(report) == (folder / "index.html").read_text()


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
    "with nothing seen": lambda: RunReport.of(
        [replace(made_up.record(), spans=(), changes=(), sent={})], about={}
    ),
    "with one bad loss": lambda: made_up.report(training=Training(0, (None,), (), 1)),
}


@needs_chromium
@pytest.mark.parametrize("build", BROWSED.values(), ids=BROWSED)
def test_a_browser_draws_every_chart_without_a_word_on_its_console(tmp_path, build):
    report = build()
    write(tmp_path, report, [report.step])
    done = browse(tmp_path, "--dump-dom")
    assert "CONSOLE" not in done.stderr
    drawn = re.findall(r'<svg class="chart".*?</svg>\n<p', done.stdout, re.DOTALL)
    assert len(drawn) == len(charts(report))
    assert all('class="base"' in svg for svg in drawn)
    predicted = bool(report.plan and report.plan.predicted.timeline)
    assert ('class="predicted"' in done.stdout) == predicted


@needs_chromium
def test_the_drawn_page_has_the_names_as_text_and_the_edge_of_the_stack_at_the_total(tmp_path):
    report = made_up.report(plan=made_up.plan())
    write(tmp_path, report, [report.step])
    dom = browse(tmp_path, "--dump-dom").stdout
    assert dom.count('class="memory"') == 3
    assert dom.count('role="img"') == 6
    assert 'class="timeline"' in dom
    assert "&lt;script&gt;alert('x')&lt;/script&gt;" in dom
    chart = dom[dom.index('<svg class="chart"') : dom.index('<p class="readout')]
    areas = re.findall(r'<path d="([^"]*)" class="area', chart)
    (stack, *_) = memory_stacks(report.step)
    assert len(areas) == len(stack.layers)
    height, headroom = 300, 36
    assert max(float(y) for y in re.findall(r",([\d.]+)", areas[0])) == height
    top = min(float(y) for y in re.findall(r",([\d.]+)", areas[-1]))
    assert top == pytest.approx(height * (1 - 1 / (1 + headroom / height)), abs=0.1)
    assert f">peak {format_bytes(max(stack.totals))}</text>" in chart


PROBE = """<!DOCTYPE html><html><body><iframe src="index.html" width="%d" height="900"></iframe>
<pre></pre><script>
addEventListener('load', () => {
  const inner = document.querySelector('iframe'), page = inner.contentDocument;
  const root = page.documentElement, chart = page.querySelector('.memory svg');
  const box = chart.getBoundingClientRect(), line = page.querySelector('.readout');
  const wide = [...page.querySelectorAll('main *')].filter(node =>
    !node.closest('.wide') && !node.closest('svg') &&
    node.getBoundingClientRect().right > root.clientWidth + 1);
  chart.dispatchEvent(new inner.contentWindow.PointerEvent('pointermove',
    {clientX: box.left + box.width / 2, clientY: box.top + 50}));
  document.querySelector('pre').textContent = JSON.stringify({
    page: root.scrollWidth, room: root.clientWidth, chart: box.width, readout: line.textContent,
    wide: wide.map(node => node.outerHTML.slice(0, 90)),
    letters: Math.min(...[...page.querySelectorAll('text')].map(
      node => parseFloat(getComputedStyle(node).fontSize)))});
});</script></body></html>"""


@needs_chromium
@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_is_cut_off_and_letters_stay_readable(tmp_path, width):
    write(tmp_path, made_up.report(plan=made_up.plan()), [made_up.record()])
    write(tmp_path / "inner", made_up.report(plan=made_up.plan()), [made_up.record()])
    (tmp_path / "inner" / "index.html").rename(tmp_path / "page.html")
    (tmp_path / "index.html").write_text((PROBE % width).replace("index.html", "page.html"))
    done = browse(tmp_path, "--dump-dom", "--allow-file-access-from-files")
    found = json.loads(re.findall(r"<pre>(.*?)</pre>", done.stdout, re.DOTALL)[0])
    assert "CONSOLE" not in done.stderr
    assert found["wide"] == []
    assert found["page"] <= found["room"]
    assert found["chart"] > 0.7 * found["room"]
    assert found["letters"] >= 11
    assert re.match(r"50\.\d ms: [\d.]+ MiB = ", found["readout"])


@needs_chromium
def test_it_prints_on_paper(tmp_path):
    write(tmp_path, made_up.report(plan=made_up.plan()), [made_up.record()])
    target = tmp_path / "page.pdf"
    browse(tmp_path, f"--print-to-pdf={target}", "--no-pdf-header-footer")
    pages = len(re.findall(rb"/Type\s*/Page\b", target.read_bytes()))
    assert 2 <= pages <= 6
