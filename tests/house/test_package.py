"""What a package index, a citation and the host of the repository are told about the project."""

from __future__ import annotations

import re
import runpy
import tomllib

import yaml

import onefold
from tests.support.sources import ROOT, text_of

PROJECT = tomllib.loads(text_of(ROOT / "pyproject.toml"))["project"]
TOOL = runpy.run_path(str(ROOT / "docs" / "tools" / "index_page.py"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_the_version_has_a_dated_entry_in_the_changelog_and_in_the_citation():
    newest = re.search(r"^## (.*)$", text_of(ROOT / "CHANGELOG.md"), re.MULTILINE)
    assert newest is not None
    version, _, date = newest[1].partition(" - ")
    assert version == onefold.__version__
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", date)
    citation = yaml.safe_load(text_of(ROOT / "CITATION.cff"))
    assert (citation["version"], citation["date-released"]) == (version, date)
    assert citation["license"] == PROJECT["license"]
    assert [author["name"] for author in citation["authors"]] == [PROJECT["authors"][0]["name"]]


def test_the_package_is_typed_and_names_every_python_that_the_workflow_tests():
    assert "Typing :: Typed" in PROJECT["classifiers"]
    assert (ROOT / "src" / "onefold" / "py.typed").exists()
    tests = yaml.safe_load(text_of(ROOT / ".github" / "workflows" / "ci.yml"))["jobs"]["tests"]
    heads = "Programming Language :: Python :: 3."
    named = [line for line in PROJECT["classifiers"] if line.startswith(heads)]
    assert [line.rpartition(" ")[2] for line in named] == tests["strategy"]["matrix"]["python"]
    assert PROJECT["requires-python"] == f">={tests['strategy']['matrix']['python'][0]}"


def test_the_page_of_the_index_has_no_relative_link():
    readme, code = text_of(ROOT / "README.md"), re.compile(r"^```.*?^```$", re.M | re.S)
    assert TOOL["relative_links"](readme) != []
    for base in ("https://host/owner/onefold/{}/v1", ""):
        page: str = TOOL["index_page"](readme, base)
        assert TOOL["relative_links"](page) == [], base
        assert ("https://host/owner/onefold/blob/v1/docs/" in page) == bool(base)
        assert code.findall(page) == code.findall(readme), base


def test_the_badges_say_what_the_metadata_says():
    """As the badge service writes them: two dashes for one."""
    badges = text_of(ROOT / "README.md").splitlines()[2]
    torch = next(each for each in PROJECT["dependencies"] if each.startswith("torch"))
    oldest, above = re.findall(r"2\.(\d+)", torch)
    python, licence = PROJECT["requires-python"].removeprefix(">="), PROJECT["license"]
    assert f"badge/python-{python}+-" in badges
    assert f"badge/torch-2.{oldest}--2.{int(above) - 1}-" in badges
    assert f"badge/license-{licence.replace('-', '--')}-" in badges


def test_a_link_around_an_image_is_absolute_in_both():
    page = TOOL["index_page"]("[![ci](a.svg)](b.md) `x[0](y)`", "https://host/{}")
    assert page.startswith("[![ci](https://host/raw/a.svg)](https://host/blob/b.md)")
    assert TOOL["index_page"]("[text](b.md)![image](a.svg)", "") == "text"


def test_workflows_run_targets_of_the_makefile_and_files_that_exist():
    targets = re.findall(r"^([\w-]+):", text_of(ROOT / "Makefile"), re.MULTILINE)
    wrong = []
    for path in WORKFLOWS:
        for job in yaml.safe_load(text_of(path))["jobs"].values():
            words = [step.get("run", "").split() for step in job.get("steps", ())]
            made = [line[1] for line in words if line[:1] == ["make"]]
            paths = [word for line in words for word in line if "/" in word and "${" not in word]
            wrong += [f"{path.name}: no target {name}" for name in made if name not in targets]
            wrong += [
                f"{path.name}: no file {name}"
                for name in (*paths, job.get("uses", "."))
                if not (ROOT / name).exists()
            ]
    assert wrong == []
    assert len(WORKFLOWS) == 4


def test_every_target_that_continuous_integration_runs_here_is_in_the_workflow():
    ran = {line for line in text_of(ROOT / ".ci" / "run").splitlines() if line[:5] == "make "}
    text = text_of(ROOT / ".github" / "workflows" / "ci.yml")
    assert {line for line in ran if f"run: {line}" not in text} == set()


def test_forms_and_files_of_the_repository_parse_and_name_no_person_or_address():
    texts = [*(ROOT / ".github").rglob("*.yml"), ROOT / ".pre-commit-config.yaml"]
    for path in texts:
        assert yaml.safe_load(text_of(path))
    for name in ("SECURITY.md", "CODE_OF_CONDUCT.md", "CITATION.cff", "Dockerfile"):
        assert "@" not in text_of(ROOT / name)


def test_a_release_and_the_site_wait_for_the_whole_of_continuous_integration():
    read = {path.stem: yaml.safe_load(text_of(path))["jobs"] for path in WORKFLOWS}
    for name, needed in (("release", {"ci", "wheels"}), ("site", {"ci"})):
        jobs = read[name]
        assert jobs["ci"]["uses"] == "./.github/workflows/ci.yml"
        needs = jobs["publish"]["needs"]
        assert ({needs} if isinstance(needs, str) else set(needs)) == needed


def test_the_workflow_tests_the_oldest_and_the_newest_torch_that_the_metadata_allows():
    torch = next(each for each in PROJECT["dependencies"] if each.startswith("torch"))
    oldest, above = re.findall(r"2\.(\d+)", torch)
    jobs = yaml.safe_load(text_of(ROOT / ".github" / "workflows" / "ci.yml"))["jobs"]
    tested = [each["torch"] for each in jobs["torch"]["strategy"]["matrix"]["include"]]
    assert tested == [f"2.{oldest}.0", f"2.{int(above) - 1}.0"]


def test_building_the_package_installs_no_torch_and_building_the_site_no_integration():
    makefile = text_of(ROOT / "Makefile")
    rules = dict(re.findall(r"^\$\(VENV\)/(\w+)\.done:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE))
    needs = dict(re.findall(r"^\$\(VENV\)/(\w+)\.done:(.*)", makefile, re.MULTILINE))
    assert "torch" not in rules["package"]
    assert ".done" not in needs["package"]
    assert "dev" not in rules["docs"] + needs["docs"]


def test_the_image_pins_python_and_torch_and_does_not_run_as_root():
    lines = text_of(ROOT / "Dockerfile").splitlines()
    pinned = re.search(r"^torch==(.*)$", text_of(ROOT / "constraints.txt"), re.MULTILINE)
    assert pinned is not None
    assert f'ARG TORCH="torch=={pinned[1]}"' in lines
    assert any(re.fullmatch(r"FROM python:3\.\d+\.\d+-slim-\w+", line) for line in lines)
    assert "USER onefold" in lines
