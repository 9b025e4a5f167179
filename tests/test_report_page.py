"""The page of a report: complete, self-contained, well-formed, right, and quiet in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import onefold
from onefold.errors import ConfigError
from onefold.recording.files import read, write
from onefold.recording.kinds import KINDS, VERBS
from onefold.recording.markup import bytes_text, count_text, el, seconds_text, share_text
from onefold.recording.memory_chart import MAX_COLUMNS, ROOM, panels, predicted_line
from onefold.recording.page import page
from onefold.recording.run_report import RunReport
from onefold.recording.step_record import Change
from tests import made_up
from tests.commands import onefold as command
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


def parsed(report: RunReport) -> ElementTree.Element:
    text = page(report)
    assert text.startswith("<!DOCTYPE html>\n")
    return ElementTree.fromstring(text.partition("\n")[2])


@pytest.mark.parametrize("build", REPORTS.values(), ids=REPORTS)
def test_a_page_is_well_formed_and_refers_to_nothing_outside_itself(build):
    text = page(build())
    root = parsed(build())
    for node in root.iter():
        assert "src" not in node.attrib
        assert "style" not in node.attrib
        for name in ("href", "data", "action", "poster"):
            assert node.attrib.get(name, "#").startswith(("#", "data:"))
    assert not re.search(r"https?:|//[a-z]|@import|url\(", text)


@pytest.mark.parametrize("build", REPORTS.values(), ids=REPORTS)
def test_every_chart_has_a_title_a_description_and_words_for_screen_readers(build):
    charts = [node for node in parsed(build()).iter("svg") if node.get("role") == "img"]
    assert len(charts) >= 2
    for chart in charts:
        assert chart[0].tag == "title"
        assert chart[0].text
        assert chart[1].tag == "desc"
        assert chart[1].text
        assert chart.get("aria-label")


def test_names_are_text_whatever_they_are():
    root = parsed(made_up.report(plan=made_up.plan()))
    words = "".join(root.itertext())
    assert made_up.AWKWARD in words
    assert words.count("alert('x')") == words.count("<script>alert('x')</script>")
    scripts = [node for node in root.iter("script") if node.get("type") is None]
    assert len(scripts) == 1


def test_every_kind_and_verb_that_occurs_has_its_words_beside_its_colour():
    report = made_up.report()
    root = parsed(report)
    told = {"".join(row.itertext()) for row in root.iter("th") if row.get("scope") == "row"}
    for series in report.step.series:
        where = "" if series.tier == "device" else f", on {series.tier}"
        assert KINDS[series.kind] + where in told
    for span in report.step.spans:
        if span.stream != "phase":
            assert VERBS.get(span.verb, span.verb) in told
    keys = [node.get("class", "") for node in root.iter("span") if "key" in node.get("class", "")]
    style = next(root.iter("style")).text or ""
    assert len(keys) > 10
    for key in keys:
        assert f".{key.split()[1]}{{--c:" in style or key == "key dashes"


@pytest.mark.parametrize("build", REPORTS.values(), ids=REPORTS)
def test_stacked_layers_sum_to_what_is_held_at_every_moment(build):
    record = build().step
    memory = record.memory
    for panel in panels(record):
        indices = [i for i, series in enumerate(record.series) if series.tier == panel.tier]
        held = dict(
            zip(
                memory.times,
                (sum(memory.nbytes[i][m] for i in indices) for m in range(len(memory.times))),
                strict=True,
            )
        )
        assert panel.totals == [held[time] for time in panel.times]
        assert max(panel.totals) == max(held.values())


def test_the_uppermost_edge_of_the_stack_is_drawn_at_the_total():
    report = made_up.report()
    (panel, *_), root = panels(report.step), parsed(report)
    chart = next(node for node in root.iter("svg") if node.get("role") == "img")
    areas = [node for node in chart.iter("path") if "area" in node.get("class", "")]
    assert len(areas) == len(panel.layers)
    tops = [float(y) for y in re.findall(r",([\d.]+)", areas[-1].get("d", ""))]
    bottoms = [float(y) for y in re.findall(r",([\d.]+)", areas[0].get("d", ""))]
    assert max(bottoms) == 300.0
    expected = 300 * (1 - 1 / (1 + ROOM / 300))
    assert min(tops) == pytest.approx(expected, abs=0.1)


def test_a_thousand_times_as_many_moments_draw_no_more_columns_and_keep_the_peak():
    own = made_up.record()
    many = [Change(own.seconds * n / 50_000, n % 3, (n * 7919) % 100_003) for n in range(50_000)]
    record = replace(own, changes=tuple(many))
    (panel,) = panels(record)
    assert len(panel.times) <= MAX_COLUMNS + 1
    assert max(panel.totals) == record.peaks["device"]
    assert len(page(made_up.report(step=record))) < 600_000


def test_the_predicted_line_stands_where_the_plans_units_were_computed():
    report = made_up.report(plan=made_up.plan())
    found = predicted_line(report.step, report.plan)
    spans = {(s.start, s.stop): (s.verb, s.unit) for s in report.step.spans if s.verb != "wait"}
    assert [spans[start, stop] for start, stop, _ in found] == [
        *(("forward", unit) for unit in made_up.UNITS),
        *(("backward", unit) for unit in made_up.UNITS[::-1]),
        ("step", ""),
    ]
    assert found[1][2] == 21 * made_up.MIB
    assert 'class="predicted"' in page(report)
    assert 'class="predicted"' not in page(made_up.report())


def test_a_plan_with_no_prediction_leaves_the_line_out():
    text = page(made_up.report(plan={"stage": 2}))
    assert 'class="predicted"' not in text
    assert "Chosen: stage 2." in text


def test_numbers_have_units():
    assert [bytes_text(n) for n in (0, 1023, 1024, 1536, 2**20, 5.25 * 2**30, 2**50)] == [
        "0 bytes", "1,023 bytes", "1.00 KiB", "1.50 KiB", "1.00 MiB", "5.25 GiB", "1,024 TiB",
    ]  # fmt: skip
    assert [seconds_text(s) for s in (0, 2.5e-6, 0.0123, 1.5, 100)] == [
        "0 ms", "2.50 \N{MICRO SIGN}s", "12.3 ms", "1.50 s", "100 s",
    ]  # fmt: skip
    assert [count_text(n) for n in (7, 99_999, 123_456, 4_872_704)] == [
        "7", "99,999", "123 k", "4.87 M",
    ]  # fmt: skip
    assert [share_text(s) for s in (0, 0.017, 0.5, 1)] == ["0 %", "1.7 %", "50 %", "100 %"]


def test_what_becomes_part_of_an_element_is_escaped():
    assert el("p", {"title": '"<'}, "<b>", el("b", {}, "&")) == (
        '<p title="&quot;&lt;">&lt;b&gt;<b>&amp;</b></p>'
    )


# the command


def test_report_draws_the_page_again_and_prints_a_summary(tmp_path):
    write(tmp_path, made_up.report(plan=made_up.plan()), [made_up.record()])
    drawn = (tmp_path / "index.html").read_text()
    (tmp_path / "index.html").unlink()
    done = command("report", str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "index.html").read_text() == drawn
    assert "rank 1" in done.stdout
    assert "held at most, disk" in done.stdout
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
    "a table of numbers": {"table": [1, 2]},
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
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip


@needs_chromium
def test_a_browser_draws_the_page_without_a_word_on_its_console(tmp_path):
    write(tmp_path, made_up.report(plan=made_up.plan()), [made_up.record()])
    done = browse(tmp_path, "--dump-dom")
    assert "CONSOLE" not in done.stderr
    assert done.stdout.count('class="memory"') == 3
    assert done.stdout.count('role="img"') == 6
    assert 'class="timeline"' in done.stdout
    assert "&lt;script&gt;alert('x')&lt;/script&gt;" in done.stdout


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
