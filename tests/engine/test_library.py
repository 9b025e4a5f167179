"""The library of the C kernels: compiled whole or not at all, found only if of this source."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from onefold.engine.adam_kernel import AdamKernel
from onefold.wire.kernels import compiling
from onefold.wire.kernels.library import library


def test_a_library_that_is_not_there_or_none_is_no_kernel(tmp_path):
    assert library(tmp_path / "nothing.so") is None
    text = tmp_path / "text.so"
    text.write_text("not a library")
    assert library(text) is None
    assert AdamKernel.offered_by(None) == []


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_library_that_lacks_a_kernel_has_none_for_any_cpu(tmp_path, monkeypatch):
    (tmp_path / "other.c").write_text("int other;")
    monkeypatch.setattr(compiling, "FOLDER", tmp_path)
    assert compiling.compile_library(["cc"], tmp_path / "other.so") == ""
    found = library(tmp_path / "other.so")
    assert found is not None
    assert AdamKernel.offered_by(found) == []


@pytest.mark.parametrize("compiler", [["no-such-compiler"], ["false"]])
def test_a_compiler_that_fails_leaves_no_library_and_says_why(compiler, tmp_path):
    assert compiling.compile_library(compiler, tmp_path / "kernel.so")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("edited", ["adam.c", "common.h"])
def test_a_library_of_other_sources_is_not_found(edited, monkeypatch, tmp_path):
    now = compiling.library_path()
    for source in compiling.FOLDER.glob("*.[ch]"):
        shutil.copy(source, tmp_path)
    monkeypatch.setattr(compiling, "FOLDER", Path(tmp_path))
    assert compiling.library_path() == tmp_path / now.name
    (tmp_path / edited).write_bytes((tmp_path / edited).read_bytes() + b"\n")
    assert compiling.library_path().name != now.name
