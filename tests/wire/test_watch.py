"""The search for tensors in outputs: all of them, and each object once."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from onefold.engine.watch import tensors_in


class Counted(UserDict):
    """A mapping that counts how often somebody looks into it."""

    looks = 0

    def values(self) -> Any:
        self.looks += 1
        return super().values()


class Slotted:
    __slots__ = ("one", "unset")


class OneSlot(Slotted):
    __slots__ = "two"


@dataclass
class Pair:
    first: object
    second: object


class Color(Enum):
    RED = 1


def found(value: object) -> list[int]:
    return [int(tensor) for tensor in tensors_in(value)]


def test_every_kind_of_container_is_searched_in_its_order():
    one, two, three, four = (torch.tensor(each) for each in range(1, 5))
    slotted = OneSlot()
    slotted.one, slotted.two = three, [four]
    assert found((one, [two], {"a": {"b": three}}, four)) == [1, 2, 3, 4]
    assert found(OrderedDict(a=Pair(two, (one,)), b=one)) == [2, 1, 1]
    assert found(SimpleNamespace(a=slotted, b=UserDict(c=one))) == [4, 3, 1]
    assert found(nn.Parameter(torch.tensor(5.0))) == [5]
    for leaf in (
        None,
        1,
        2.5,
        "text",
        b"",
        Color.RED,
        Pair,
        nn.Linear(2, 2),
        torch,
        one.size(),
        len,
    ):
        assert found([leaf, two]) == [2]


def test_six_levels_are_searched_also_on_a_second_and_shorter_way():
    value: object = torch.tensor(1)
    for _ in range(5):
        value = [value]
    assert found([value]) == [1]
    assert found([[value]]) == []
    assert found([[value], value]) == [1], "reached too deep first"


def test_objects_that_refer_to_each_other_are_searched_once():
    one = torch.tensor(1)
    shared = Counted(tensor=one)
    level: Any = shared
    for _ in range(5):  # 100 million ways lead to it
        level = [level] * 40
    assert found(level) == [1]
    assert shared.looks == 1
    shared["itself"] = shared
    shared["back"] = SimpleNamespace(owner=shared, others=[shared, one])
    assert found((shared, shared)) == [1, 1]
    assert shared.looks == 2


def test_what_holds_no_tensors_is_not_looked_into():
    class Numbers(list):
        looks = 0

        def __iter__(self) -> Any:
            self.looks += 1
            return super().__iter__()

    numbers = Numbers(range(10_000))
    assert found(Pair(numbers, nn.ModuleDict({"a": nn.Linear(2, 2)}))) == []
    assert numbers.looks == 1
