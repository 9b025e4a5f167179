"""Find a module's tensors in files whose names and layouts are others than the module's.

transformers 5 keeps weights of many models in files under older names, and in another layout:
experts one by one, queries, keys and values in one matrix. Its rules are read from the library,
and followed as moves of boxes (mosaics.py). A module of another library has its own names.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from onefold.checkpoint.agreement import NOT_OF_BYTES
from onefold.checkpoint.mosaics import Mosaic, NotBoxes
from onefold.errors import CheckpointError

HINT = "download or save the folder again"


class NamedFiles(Protocol):
    """Files of tensors."""

    @property
    def places(self) -> Iterable[str]:
        """All names."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        ...

    def whole(self, name: str) -> Tensor:
        """Return all of a tensor, in exact numbers."""
        ...


@dataclass(frozen=True, slots=True)
class Computed:
    """A tensor that a rule makes of whole tensors, by arithmetic. One is in memory at a time."""

    rule: Any
    groups: dict[str, list[str]]  # names in files, by the rule's pattern
    target: str
    module: nn.Module
    first: str  # the target under which the rule was found

    def values(self, files: NamedFiles) -> Tensor:
        """Read the sources whole, and run the rule."""
        made = _converted(self.rule, self.groups, self.first, self.module, files.whole)
        return made[self.target]


@dataclass(slots=True)
class NamesInFiles:
    """Where each tensor of a module is. `unknown`: names in files that no rule leads to one."""

    plain: dict[str, str] = field(default_factory=dict)
    mosaics: dict[str, Mosaic] = field(default_factory=dict)
    computed: dict[str, Computed] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    rules: list[Any] | None = None  # those that were used, for a save under the same names

    def __contains__(self, name: str) -> bool:
        return name in self.plain or name in self.mosaics or name in self.computed

    def sources(self, name: str) -> list[str]:
        """Return the names in files that a tensor is made of."""
        if name in self.plain:
            return [self.plain[name]]
        if name in self.computed:
            return [each for group in self.computed[name].groups.values() for each in group]
        return sorted({tile.source for tile in self.mosaics[name].tiles})


def find_names(module: nn.Module, names: Iterable[str], files: NamedFiles) -> NamesInFiles:
    """Find the tensors of a module, all `names` of its parameters and persistent buffers.

    Raises: CheckpointError: two tensors of the files are one of the module's, or a rule does not
        work on these files.
    """
    known = set(names)
    rules = _rules_of(module)
    if not rules and not _is_transformers(module):
        plain = {name: name for name in files.places if name in known}
        unknown = [name for name in files.places if name not in known]
        return NamesInFiles(plain, unknown=unknown)
    return _by_rules(module, known, files, rules)


def _is_transformers(module: nn.Module) -> bool:
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(module, library.PreTrainedModel)


def _rules_of(module: nn.Module, *, add_legacy: bool = True) -> list[Any]:
    """Return transformers' rules for a module; [] for a module of another library."""
    if not _is_transformers(module):
        return []
    from transformers.conversion_mapping import get_model_conversion_mapping

    model: Any = module
    return list(get_model_conversion_mapping(model, add_legacy=add_legacy))


def _by_rules(
    module: nn.Module, known: set[str], files: NamedFiles, rules: list[Any]
) -> NamesInFiles:
    """Group the names in files by the tensors that they lead to, as transformers' loader does."""
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    of_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    options: dict[str, Any] = {
        "base_model_prefix": getattr(module, "base_model_prefix", "") or None,
        "meta_state_dict": dict.fromkeys(known, True),
    }
    found = NamesInFiles()
    groups: dict[str, tuple[Any, dict[str, list[str]]]] = {}
    for original in sorted(files.places, key=dot_natural_key):  # the order of experts
        name, pattern = rename_source_key(original, renamings, converters, **options)
        if name not in known and original in known:
            name, pattern = rename_source_key(original, [], [], **options)
        if name not in known:
            found.unknown.append(original)
            continue
        rule = of_pattern[pattern] if pattern is not None else None
        before, by_pattern = groups.setdefault(name, (rule, {}))
        if before is not rule or (rule is None and by_pattern):
            first = next(each for group in by_pattern.values() for each in group)
            wanted = f"one tensor in the files for {name!r}"
            hint = f"the folder holds it in two layouts; {HINT}"
            raise CheckpointError(wanted, f"{first!r} and {original!r}", hint=hint)
        by_pattern.setdefault(pattern or original, []).append(original)
    for name, (rule, by_pattern) in groups.items():
        if rule is None:
            ((found.plain[name],),) = by_pattern.values()
        else:
            _follow(found, rule, by_pattern, name, module, files)
    _check_once(found)
    found.rules = [rule for rule in rules if rule.was_used()]
    return found


def _follow(
    found: NamesInFiles, rule: Any, groups: dict[str, list[str]], first: str, module: nn.Module,
    files: NamedFiles,
) -> None:  # fmt: skip
    """Note what a converter makes of tensors in files, as boxes, or as computed."""

    def symbol(name: str) -> Tensor:
        return Mosaic.blank(name, files.shape(name), torch.float32)

    try:
        made = _converted(rule, groups, first, module, symbol)
    except NotBoxes:
        meta = _converted(rule, groups, first, module, lambda name: torch.empty(
            files.shape(name), device="meta"
        ))  # fmt: skip
        for target in meta:
            found.computed[target] = Computed(rule, groups, target, module, first)
        return
    for target, value in made.items():
        assert isinstance(value, Mosaic), "an operation on mosaics gives mosaics"
        found.mosaics[target] = value


def _converted(
    rule: Any, groups: Mapping[str, Sequence[str]], first: str, module: nn.Module, of: Any
) -> dict[str, Tensor]:
    """Run a converter on `of(name)` for each name; return its results by their names."""
    fresh = copy.deepcopy(rule)
    for pattern, names in groups.items():
        for name in names:
            fresh.add_tensor(first, name, pattern, of(name))
    config = getattr(module, "config", None)
    try:
        made = fresh.convert(first, model=module, config=config)
    except (NotBoxes, *NOT_OF_BYTES):
        raise
    except Exception as error:
        names = [name for group in groups.values() for name in group]
        wanted = f"the files' tensors that make {first!r} to fit one another"
        got = f"{len(names)} from {names[0]!r} to {names[-1]!r}: {str(error).splitlines()[0][:200]}"
        raise CheckpointError(wanted, got, hint=HINT) from error
    return {name: v[0] if isinstance(v, list) else v for name, v in made.items()}


def _check_once(found: NamesInFiles) -> None:
    """Raise `CheckpointError` for a tensor that is there by itself and by a rule."""
    for name in found.mosaics.keys() | found.computed.keys():
        if name in found.plain:
            sources = found.sources(name)
            other = next((each for each in sources if each != found.plain[name]), sources[0])
            wanted = f"one tensor in the files for {name!r}"
            hint = f"the folder holds it in two layouts; {HINT}"
            raise CheckpointError(wanted, f"{found.plain[name]!r} and {other!r}", hint=hint)


def remember_rules(module: nn.Module, names: NamesInFiles) -> None:
    """Let transformers save the module under the names that it was loaded from, as its own does."""
    if names.rules is not None:
        module.__dict__["_weight_conversions"] = names.rules


def ignored(module: nn.Module, attribute: str) -> Iterator[str]:
    """Yield the patterns of names that a model of transformers does not load, or does not save."""
    if _is_transformers(module):
        yield from getattr(module, attribute, None) or ()


def tied_source(module: nn.Module, name: str) -> str:
    """Return the name under which transformers saves a tied weight; any other name as it is."""
    ties: Mapping[str, str] = getattr(module, "all_tied_weights_keys", None) or {}
    return ties.get(name, name) if _is_transformers(module) else name


def empty_model(config: Mapping[str, Any] | None) -> nn.Module | None:
    """Build a model of transformers on `meta` from its saved configuration.

    None for no configuration, one of a class that it does not have, and where it is not installed.
    """
    names = (config or {}).get("architectures") or []
    if len(names) != 1 or find_spec("transformers") is None:
        return None
    import transformers

    kind: Any = getattr(transformers, str(names[0]), None)
    config_class = getattr(kind, "config_class", None)
    if config_class is None:
        return None
    try:
        with torch.device("meta"):
            return kind(config_class.from_dict(dict(config or {})))
    except Exception:
        return None  # of another version, or of code that is not here: names as in the module


def written_as(module: nn.Module, tensors: Mapping[str, Mosaic]) -> dict[str, Mosaic]:
    """Return what files hold of a module's tensors, under the names that transformers gives them.

    Raises: CheckpointError: a rule that does more than move boxes.
    """
    if not _is_transformers(module):
        return dict(tensors)
    from transformers.core_model_loading import revert_weight_conversion

    model: Any = module
    kept: Any = dict(tensors)
    try:
        made: Any = revert_weight_conversion(model, kept)
    except NotBoxes as error:
        wanted = (
            f"transformers to keep the weights of {type(module).__name__} as they are, or moved"
        )
        hint = "onefold.save_pretrained(..., original_names=False) writes the module's own names"
        raise CheckpointError(wanted, f"computed ones, by {error}", hint=hint) from error
    return dict(made)
