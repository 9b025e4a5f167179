"""Laws of errors: one sentence in the house's style, which survives every way an error travels."""

from __future__ import annotations

import copy
import pickle

import pytest

from onefold import errors
from onefold.errors import OnefoldError, TierError
from onefold.unit import refusals

CLASSES = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, OnefoldError)
]
TRAVELS = {
    "pickle": lambda error: pickle.loads(pickle.dumps(error)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


def test_an_error_says_what_was_expected_what_came_where_and_what_to_do():
    for kind in CLASSES:
        error = kind("a disk", None, where="rank 1", hint="mount one")
        assert str(error) == "expected a disk, got None (rank 1)\nhint: mount one"
        assert str(kind("a disk", 3, hint="mount one")) == "expected a disk, got 3\nhint: mount one"
        assert str(kind("rank 2: as it said")) == "rank 2: as it said"


def test_a_copied_error_has_the_class_the_message_and_the_notes():
    wrong = []
    for kind in CLASSES:
        for error in (
            kind("a disk", {"a": 1}, where="rank 1", hint="mount one"),
            kind("torn\nhint: x"),
        ):
            error.add_note("at step 3")
            for travel, way in TRAVELS.items():
                copied = way(error)
                found = (type(copied), str(copied), getattr(copied, "__notes__", None))
                if found != (kind, str(error), ["at step 3"]):
                    wrong.append(f"{kind.__name__} by {travel}: {found}")
    assert wrong == []


def test_a_copied_tier_error_says_what_the_system_refused():
    error = TierError("a write", "ENOSPC", hint="free space").at(OSError(28, "x"), "/disk", 8, 16)
    wanted = {"errno": 28, "path": "/disk", "offset": 8, "nbytes": 16}
    found = {travel: way(error) for travel, way in TRAVELS.items()}
    said = {
        travel: {name: getattr(e, name, None) for name in wanted} for travel, e in found.items()
    }
    assert said == dict.fromkeys(TRAVELS, wanted)
    assert {*map(str, found.values())} == {"expected a write, got ENOSPC\nhint: free space"}


def test_an_error_without_a_hint_is_a_mistake_of_ours():
    for arguments in (("a disk", "none"), ("a disk", "none", "more")):
        with pytest.raises(TypeError):
            OnefoldError(*arguments)


def test_every_refusal_names_its_parameter_and_repeats_braces_of_names():
    table = [value for value in vars(refusals).values() if isinstance(value, refusals.Refusal)]
    assert len(table) == 34
    for refusal in table:
        text = str(refusal("blocks.{0}.weight", "moved to {1}", where="rank 1"))
        assert text.startswith("expected ")
        assert " (rank 1)\nhint: " in text
        named = "{" in refusal.wanted + refusal.got
        assert ("blocks.{0}.weight" in text) == named
