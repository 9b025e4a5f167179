"""Showing: puts the forms of a unit's parameters into their modules, and sees what users changed.

A step does this for each parameter some times, so it is felt more than all else of a small model.
Hence lists in the place of attributes, made again when a place in the module tree has changed.
"""

from collections.abc import Sequence
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from onefold.unit import refusals
from onefold.unit.parameter import UnitParameter
from onefold.unit.quantized_bytes import plain_bytes

_PLACES, _LOCAL = map(attrgetter, ("places", "local"))
_TRAINS, _VERSION, _SHAPE = map(attrgetter, ("requires_grad", "_version", "shape"))
_ADDRESS = Tensor.data_ptr

Shown = list[tuple[dict[str, Any], str, nn.Parameter]]
"""Parameters of a module, the name of one of them, and what it shows there."""


class Showing:
    """The places of one unit's parameters. Callers disable functions of subclasses."""

    def __init__(self, parameters: Sequence[UnitParameter]) -> None:
        self._parameters = parameters
        self._known: list[object] = []  # the places that the lists below are of
        self._trained: list[bool] = []  # whether each required a gradient when it was shown last
        self._versions: list[int] = []  # of unsharded forms, when they were shown last
        self._sharded: list[nn.Parameter] = []
        self._unsharded: list[nn.Parameter] = []
        self._moving: list[UnitParameter] = []  # they compute with another object than they show
        self._at_rest: Shown = []
        self._computing: Shown = []
        self._in_kernels: list[UnitParameter] = []  # places that are no module's parameters
        self._plain: list[UnitParameter] = []  # whose sharded form is a plain tensor
        self._addresses: list[int] = []  # theirs
        self._shapes: list[torch.Size] = []
        self._cut: list[UnitParameter] = []  # whose is a DTensor, which may be cut anew

    def _follow(self) -> None:
        """Make the lists again where parameters have moved: then they have another list each."""
        now = [*map(_PLACES, self._parameters)]
        if len(now) == len(self._known) and all(map(is_, now, self._known)):
            return
        own = self._parameters
        self._known, self._trained = now, []
        self._sharded, self._unsharded = [p.sharded for p in own], [p.unsharded for p in own]
        self._moving = [p for p in own if p.unsharded is not p.sharded]
        self._at_rest = [(module, name, p.sharded) for p in own for module, name in p.places]
        self._computing = [
            (module, name, p.unsharded) for p in self._moving for module, name in p.places
        ]
        self._in_kernels = [p for p in own if p.kernel_places]
        self._plain = [p for p in own if not p.is_dtensor]
        self._addresses = [p.local.data_ptr() for p in self._plain]
        self._shapes = [p.local.shape for p in self._plain]
        self._cut = [p for p in own if p.is_dtensor]

    def show_unsharded(self) -> None:
        """Show unsharded parameters, which have their form: values have just been gathered."""
        self._follow()
        for module, name, unsharded in self._computing:
            module[name] = unsharded
        for parameter in self._in_kernels:
            parameter.show_values()
        self._versions = [*map(_VERSION, self._unsharded)]
        trained = [*map(_TRAINS, self._sharded)]
        if trained != self._trained or trained != [*map(_TRAINS, self._unsharded)]:
            for parameter in self._parameters:
                parameter.follow_requires_grad()
            self._trained = trained

    def show_sharded(self) -> None:
        """Show sharded parameters."""
        self._follow()
        for module, name, sharded in self._at_rest:
            module[name] = sharded
        for parameter in self._in_kernels:
            parameter.show(parameter.sharded)

    def edited(self) -> list[UnitParameter]:
        """Return those whose unsharded form was edited, or its `.data` read, since it was shown."""
        now, then = [*map(_VERSION, self._unsharded)], self._versions
        if now == then:
            return []
        return [p for p in self._moving if now[p.index] != then[p.index]]

    def note_data_read(self, parameter: UnitParameter) -> bool:
        """Take it for edited from now on; False if it was already."""
        if not self._versions:  # it was never shown
            return False
        before, self._versions[parameter.index] = self._versions[parameter.index], -1
        return before == parameter.unsharded._version

    def forget_edit(self, parameter: UnitParameter) -> None:
        """Take it for unedited from now on."""
        self._versions[parameter.index] = parameter.unsharded._version

    def check_places(self) -> None:
        """Raise `StateError` if a parameter was replaced since `shard`."""
        self._follow()
        for module, name, sharded in self._at_rest:
            if module.get(name) is not sharded:
                raise self._replaced()

    def check_memory(self) -> None:
        """Raise `StateError` if a parameter was moved or resized since `shard`."""
        plain = [parameter.sharded for parameter in self._plain]
        is_there = [*map(_ADDRESS, plain)] == self._addresses
        if not is_there or [*map(_SHAPE, plain)] != self._shapes:
            for parameter in self._plain:
                parameter.check_own()
        shown = [getattr(parameter.sharded, "_local_tensor", None) for parameter in self._cut]
        if not all(map(is_, shown, map(_LOCAL, self._cut))):
            for parameter, rows in zip(self._cut, map(plain_bytes, shown), strict=True):
                if rows is not parameter.local:
                    parameter.check_own()

    def _replaced(self) -> Exception:
        """Return the error for the first parameter that is not in one of its places."""
        places = ((p, module.get(name)) for p in self._parameters for module, name in p.places)
        parameter, found = next((p, found) for p, found in places if found is not p.sharded)
        if isinstance(found, Tensor) and not isinstance(found, nn.Parameter):
            return refusals.COMPUTED(parameter.fqn, where=parameter.spec.context.where)
        return parameter.touched("another tensor in its place")
