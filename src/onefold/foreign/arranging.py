"""Find a module's weights and its optimizers' state in the keys of another program's checkpoint.

Nothing here knows a program. Weights are the entry whose names are the module's, a prefix aside.
An optimizer is an entry with `state` and `param_groups`, in one of three forms:

    by name       state.FQN.KEY, as torch.distributed.checkpoint.state_dict writes it
    by number     state.3.KEY, as Optimizer.state_dict() does; param_groups say whose number it is
    flattened     keys "state.FQN.KEY" and "param_groups.FQN.KEY" in one dict

Everything else is extra, under its own keys.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from onefold.checkpoint.listing import (
    EXTRA,
    MODEL,
    OPTIM,
    Keys,
    Listing,
    ModuleNames,
    PieceFile,
    PieceStore,
    SavedTensor,
    Wanted,
)
from onefold.errors import CheckpointError, listed
from onefold.foreign.torch_files import Unread

STATE, GROUPS, PARAMS = "state", "param_groups", "params"
WRAPPERS = ("module.", "_orig_mod.", "_forward_module.", "model.")
"""What wrappers put before names, in any order."""


@dataclass(frozen=True, slots=True)
class Known:
    """An object that is known without reading."""

    value: Any


@dataclass(frozen=True, slots=True)
class KnownStore:
    """A store with objects that are known; see `PieceStore`."""

    store: PieceStore

    def open_file(self, file: str, wanted: Sequence[Wanted]) -> AbstractContextManager[PieceFile]:
        return self.store.open_file(file, wanted)

    def read_object(self, listed: Any) -> Any:
        return listed.value if isinstance(listed, Known) else self.store.read_object(listed)


@dataclass(slots=True)
class _Optimizer:
    """One optimizer's entry. `states`: by parameter, then by key; `groups`: by index, then key.

    `empty`: names of containers without anything in them.
    """

    where: Keys
    is_flattened: bool = False
    states: dict[Any, dict[Keys, str]] = field(default_factory=lambda: defaultdict(dict))
    groups: dict[Any, dict[Any, str]] = field(default_factory=lambda: defaultdict(dict))
    empty: list[str] = field(default_factory=list)

    @property
    def is_numbered(self) -> bool:
        return bool(self.states) and all(_is_number(key) for key in self.states)


@dataclass(slots=True)
class _Arranged:
    """The names of the result, and what each was."""

    listing: Listing
    tensors: dict[str, SavedTensor] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Keys] = field(default_factory=dict)

    def put(self, keys: Keys, name: str) -> None:
        """Take over a name of the listing under other keys."""
        new = ".".join(map(str, keys))
        self.paths[new] = keys
        if name in self.listing.tensors:
            self.tensors[new] = self.listing.tensors[name]
        else:
            self.objects[new] = self.listing.objects[name]

    def know(self, keys: Keys, value: Any) -> None:
        new = ".".join(map(str, keys))
        self.paths[new], self.objects[new] = keys, Known(value)


def arrange(
    listing: Listing, store: PieceStore, names: ModuleNames | None
) -> tuple[Listing, PieceStore]:
    """Return a checkpoint's content under the keys that Onefold gives it.

    Args:
        names: of the module and its optimizers; None, as for `inspect`: weights are the largest
            entry, and states by number keep their numbers.

    Raises: CheckpointError: two entries are the module's weights, or an optimizer is another one.
    """
    optimizers = _optimizers(listing)
    of_optimizers = {name for each in optimizers for name in _names_in(each)}
    where, prefix = _weights(listing, of_optimizers, names)
    if where is None and names is not None and names.weights:
        _refuse_unread(listing)
    made = _Arranged(listing)
    known = names.weights if names is not None else frozenset()
    for name, path in listing.paths.items():
        if name in of_optimizers:
            continue
        leaf = path[-1] if path else name
        is_inside = where is not None and path[:-1] == where and isinstance(leaf, str)
        is_weight = is_inside and name in listing.tensors and leaf.startswith(prefix)
        if is_weight and (where or leaf.removeprefix(prefix) in known or names is None):
            made.put((MODEL, leaf.removeprefix(prefix)), name)
        else:
            made.put((EXTRA, *path), name)
    own = names.optimizers if names is not None else []
    if own and optimizers and len(optimizers) != len(own):
        wanted = f"{len(own)} optimizers in the checkpoint, as are to be loaded"
        got = ", ".join(".".join(map(str, each.where)) or "one" for each in optimizers)
        hint = "build the optimizers as for the run that saved it"
        raise CheckpointError(wanted, f"{len(optimizers)}: {got}", hint=hint)
    first = 0
    for index, each in enumerate(optimizers):
        mine = own[index] if index < len(own) else None
        first += _arrange_optimizer(made, store, each, mine, first, partial_name(known, prefix))
    return Listing(made.tensors, made.objects, made.paths, listing.aliases), KnownStore(store)


def partial_name(known: Iterable[str], prefix: str) -> Callable[[str], str]:
    """Return a function that takes off what wrappers put before the name of a parameter."""
    names = set(known)

    def name_of(fqn: str) -> str:
        while fqn not in names:
            shorter = next((fqn.removeprefix(w) for w in (prefix, *WRAPPERS)
                            if w and fqn.startswith(w)), None)  # fmt: skip
            if shorter is None:
                break
            fqn = shorter
        return fqn

    return name_of


# weights


def _weights(
    listing: Listing, taken: set[str], names: ModuleNames | None
) -> tuple[Keys | None, str]:
    """Return the keys of the entry that has the weights, and what stands before their names."""
    entries = defaultdict[Keys, set[str]](set)
    for name, path in listing.paths.items():
        if name in listing.tensors and name not in taken and path and isinstance(path[-1], str):
            entries[path[:-1]].add(path[-1])
    if names is None:
        if not entries:
            return None, ""
        return max(entries, key=lambda keys: sum(
            _numel(listing, [*keys, leaf]) for leaf in entries[keys]
        )), ""  # fmt: skip
    found: list[tuple[int, Keys, str]] = []
    for keys, leaves in entries.items():
        prefix = _best_prefix(leaves, names.weights)
        hits = sum(f"{prefix}{name}" in leaves for name in names.weights)
        if hits:
            found.append((hits, keys, prefix))
    if not found:
        return None, ""
    found.sort(key=lambda entry: -entry[0])
    most = [entry for entry in found if entry[0] == found[0][0]]
    if len(most) > 1:
        both = " and ".join(repr(".".join(map(str, keys)) or "the top") for _, keys, _ in most[:2])
        hint = "load the file with torch.load, and give load_state_dict the one that is meant"
        raise CheckpointError("one entry with the names of the module", both, hint=hint)
    return found[0][1], found[0][2]


def _refuse_unread(listing: Listing) -> None:
    """Raise `CheckpointError` for an object in place of weights, such as a pickled module."""
    for name, value in listing.objects.items():
        if isinstance(value, Unread):
            wanted = "weights under the names of the module"
            got = f"a {value.kind}{f' at {name!r}' if name else ''}, which is not read"
            hint = "save model.state_dict() where the module was saved; torch.load reads a module"
            raise CheckpointError(wanted, got, hint=hint)


def _numel(listing: Listing, path: Sequence[Any]) -> int:
    saved = listing.tensors.get(".".join(map(str, path)))
    numel = 1
    for size in saved.shape if saved else (0,):
        numel *= size
    return numel


def _best_prefix(leaves: set[str], names: Iterable[str]) -> str:
    """Return what stands before most names, as "module."; "" where nothing does."""
    votes: dict[str, int] = defaultdict(int)
    for name in list(names)[:200]:
        if name in leaves:
            votes[""] += 1
        for wrapper in _wrappers():
            if f"{wrapper}{name}" in leaves:
                votes[wrapper] += 1
    return max(votes, key=lambda prefix: (votes[prefix], -len(prefix)), default="")


def _wrappers() -> list[str]:
    return [*WRAPPERS, *(a + b for a in WRAPPERS for b in WRAPPERS if a != b)]


# optimizers


def _is_number(key: Any) -> bool:
    return isinstance(key, int) or (isinstance(key, str) and key.isdecimal())


def _optimizers(listing: Listing) -> list[_Optimizer]:
    """Return all entries that have param groups, in the order of their keys."""
    found: dict[Keys, _Optimizer] = {}
    for path in listing.paths.values():
        for at, key in enumerate(path):
            if key == GROUPS and at + 1 < len(path):
                found.setdefault(path[:at], _Optimizer(path[:at]))
            elif isinstance(key, str) and key.startswith(f"{GROUPS}.") and at + 1 == len(path):
                found.setdefault(path[:at], _Optimizer(path[:at], is_flattened=True))
    for name, path in listing.paths.items():
        for at in range(len(path)):
            if path[:at] in found:
                _take(found[path[:at]], path[at:], name)
    return [found[keys] for keys in sorted(found, key=lambda keys: [str(key) for key in keys])]


def _take(each: _Optimizer, keys: Keys, name: str) -> None:
    """Note a name that belongs to an optimizer, whose own keys are these."""
    first, *inside = keys
    if each.is_flattened:
        fqn, _, key = str(first).rpartition(".")
        if inside or not fqn.startswith((f"{STATE}.", f"{GROUPS}.")):
            return
        kind, _, fqn = fqn.partition(".")
        inside = [fqn, key]
    else:
        kind = first
    if kind in (STATE, GROUPS) and not inside:
        each.empty.append(name)
    if kind not in (STATE, GROUPS) or len(inside) < 2:
        return
    owner, *rest = inside
    if kind == STATE:
        each.states[owner][tuple(rest)] = name
    else:
        each.groups[owner][rest[0] if len(rest) == 1 else tuple(rest)] = name


def _names_in(each: _Optimizer) -> Iterable[str]:
    for of in (*each.states.values(), *each.groups.values()):
        yield from of.values()
    yield from each.empty


def _arrange_optimizer(
    made: _Arranged, store: PieceStore, each: _Optimizer, own: Any, first: int,
    name_of: Callable[[str], str],
) -> int:  # fmt: skip
    """Put one optimizer's entry under our keys; return its number of param groups."""
    groups = _flattened_groups(each, own, name_of) if each.is_flattened else each.groups
    if own is not None:
        _check_settings(each, groups, own)
    named = _names_of_numbers(made, store, each, own) if each.is_numbered else {}
    for key, state in each.states.items():
        fqn = named.get(int(key), str(key)) if each.is_numbered else name_of(str(key))
        for inside, name in state.items():
            made.put((OPTIM, STATE, fqn, *inside), name)
    for index, (number, group) in enumerate(sorted(groups.items(), key=lambda g: int(g[0]))):
        for key, name in group.items():
            keys = key if isinstance(key, tuple) else (key,)
            if key != PARAMS:
                made.put((OPTIM, GROUPS, first + index, *keys), name)
        params = _params(made, store, each, group, own, int(number), name_of)
        if params is not None:
            made.know((OPTIM, GROUPS, first + index, PARAMS), params)
    return len(groups)


def _params(
    made: _Arranged, store: PieceStore, each: _Optimizer, group: Mapping[Any, str], own: Any,
    index: int, name_of: Callable[[str], str],
) -> list[str] | None:  # fmt: skip
    """Return the names of a param group's parameters."""
    if each.is_flattened:
        return own.groups[index] if own is not None else None
    if PARAMS not in group:
        return None
    saved = store.read_object(made.listing.objects[group[PARAMS]])
    if not all(_is_number(key) for key in saved):
        return [name_of(str(key)) for key in saved]
    if own is None:
        return [str(key) for key in saved]
    return list(own.groups[index])


def _flattened_groups(
    each: _Optimizer, own: Any, name_of: Callable[[str], str]
) -> dict[int, dict[Any, str]]:
    """Return param groups by number: settings of a group are those of its first parameter."""
    by_name = {name_of(fqn): settings for fqn, settings in each.groups.items()}
    if own is None:
        return dict(enumerate(list(by_name.values())[:1]))
    groups = {}
    for index, names in enumerate(own.groups):
        settings = next((by_name[name] for name in names if name in by_name), None)
        if settings is None:
            shown = ", ".join(listed(names))
            wanted = f"settings of the parameters of param group {index}, {shown}"
            hint = "build the optimizer as for the run that saved it"
            raise CheckpointError(wanted, "none in the checkpoint", hint=hint)
        groups[index] = settings
    return groups


def _check_settings(each: _Optimizer, groups: Mapping[Any, Mapping[Any, str]], own: Any) -> None:
    """Raise `CheckpointError` for other param groups, or an optimizer of another class."""
    where = ".".join(map(str, each.where)) or "the checkpoint"
    hint = "build the optimizer as for the run that saved it"
    if len(groups) != len(own.groups):
        wanted = f"{len(own.groups)} param groups in {where!r}, as are to be loaded"
        raise CheckpointError(wanted, len(groups), hint=hint)
    for group in groups.values():
        has = {key[0] if isinstance(key, tuple) else key for key in group}
        missing = sorted(own.settings - has)
        if missing:
            wanted = f"the settings of {own.kind} in {where!r}"
            got = f"an optimizer without {missing[0]!r}"
            raise CheckpointError(wanted, got, hint=hint)


def _names_of_numbers(
    made: _Arranged, store: PieceStore, each: _Optimizer, own: Any
) -> dict[int, str]:
    """Return the parameter of each number: its place in the param groups says which it is."""
    if own is None:
        return {}
    names: dict[int, str] = {}
    for index, (number, group) in enumerate(sorted(each.groups.items(), key=lambda g: int(g[0]))):
        saved = store.read_object(made.listing.objects[group[PARAMS]])
        mine = own.groups[index]
        if len(saved) != len(mine):
            wanted = f"{len(mine)} parameters in param group {number} of the checkpoint"
            hint = "build the module and the optimizer as for the run that saved it"
            raise CheckpointError(wanted, len(saved), hint=hint)
        names |= {int(key): name for key, name in zip(saved, mine, strict=True)}
    return names
