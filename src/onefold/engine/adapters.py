"""Show adapters whole in the state dict of a module that has them, as files of adapters want them.

PEFT saves the entries of `state_dict()` that belong to an adapter. One message gathers those, and
never the base. `peft_config`, a dict with the names of the adapters, is PEFT's mark on a module.
See docs/adr/0021.
"""

import warnings
from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from onefold.engine.engine import Engine
from onefold.unit.parameter import UnitParameter


class AdaptersAtHand:
    """Whether rank 0 has adapters whole already: a state dict then sends none. Of a run."""

    def __init__(self) -> None:
        self.are_known: Callable[[], bool] = lambda: False

    def ask(self, are_known: Callable[[], bool]) -> None:
        """Ask `are_known` from now on."""
        self.are_known = are_known


def show_whole(module: nn.Module, engine: Engine) -> None:
    """Let `module.state_dict()` gather adapters: a collective, if there are any.

    Rank 0 may have them whole already: `AdaptersAtHand`.
    """
    alive = ref(engine)

    def gather(root: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
        engine = alive()
        if engine is None or not getattr(root, "peft_config", None):
            return
        if engine.facts.about(AdaptersAtHand).are_known():
            return
        wanted: dict[str, UnitParameter] = {}
        bases = _adapted_embeddings(root)
        for name, sharded in root.named_parameters(remove_duplicate=False):
            parameter, shown = engine.by_sharded.get(id(sharded)), state.get(prefix + name)
            is_detached = isinstance(shown, DTensor) and shown is not sharded
            is_saved = id(sharded) in bases or _is_of_adapter(name, root, sharded)
            if parameter and is_detached and is_saved:
                wanted[prefix + name] = parameter
        whole = gathered(wanted.values())
        state.update({name: whole[parameter] for name, parameter in wanted.items()})

    module.register_state_dict_post_hook(gather)


def _is_of_adapter(name: str, root: nn.Module, sharded: nn.Parameter) -> bool:
    """True for parameters of an adapter, active or not, and for others that train beside it."""
    names: Iterable[str] = getattr(root, "peft_config", {})
    return sharded.requires_grad or any(part in names for part in name.split("."))


def _adapted_embeddings(root: nn.Module) -> set[int]:
    """The ids of weights of embeddings and heads under LoRA: PEFT saves those, too."""
    ids: set[int] = set()
    for name in ("get_input_embeddings", "get_output_embeddings"):
        find: Any = getattr(root, name, None)
        layer = find() if callable(find) else None
        if getattr(layer, "lora_A", None) is not None:
            base: Any = getattr(layer, "base_layer", None)
            ids.update(map(id, base.parameters()))
    return ids


Merges = list[tuple[nn.Module, list[str]]]


def merges_of(module: nn.Module) -> Merges:
    """Return PEFT's layers, and the names of the adapters that are merged into each now."""
    parts = [(part, getattr(part, "merged_adapters", None)) for part in module.modules()]
    return [(part, list(names)) for part, names in parts if isinstance(names, list)]


def warn_of_lost_merges(before: Merges) -> None:
    """Warn if adapters were merged, or taken out, since `before`: these edits are discarded."""
    changed = sum(getattr(part, "merged_adapters", names) != names for part, names in before)
    if changed:
        warnings.warn(
            f"adapters of {changed} layers were merged, or taken out, inside onefold.unsharded "
            "without writeback=True: the sharded weights stay as they were before. To keep merged "
            "weights, write `with onefold.unsharded(module, writeback=True):`",
            stacklevel=4,  # of the line with `with`
        )


@torch.no_grad()
def gathered(parameters: Iterable[UnitParameter]) -> dict[UnitParameter, Tensor]:
    """Return plain tensors [all rows] on every rank: one message for each dtype. A collective."""
    whole: dict[UnitParameter, Tensor] = {}
    by_dtype: dict[torch.dtype, list[UnitParameter]] = {}
    for parameter in dict.fromkeys(parameters):
        parameter.unit.wait_step()
        by_dtype.setdefault(parameter.local.dtype, []).append(parameter)
    for members in by_dtype.values():
        whole |= _gathered_alike(members)
    return whole


def _gathered_alike(members: list[UnitParameter]) -> dict[UnitParameter, Tensor]:
    context = members[0].spec.context
    ranks, device = range(context.rest_world), context.store.device
    numels = [[p.slot.piece_numel(rank) for p in members] for rank in ranks]
    own = members[0].local.new_zeros(max(map(sum, numels)), device=device)
    mine = torch.cat([p.local.reshape(-1).to(device) for p in members])
    own[: len(mine)] = mine
    rows = own
    if context.rest_world > 1:
        rows = own.new_empty(context.rest_world * len(own))
        group, label = context.transport.group, f"state_dict() of adapters on {context.where}"
        group.agree(("adapters", own.nbytes), label, own)
        group.wait(group.all_gather(rows, own), label)
        context.ledger.sent("state_dict", (context.rest_world - 1) * own.nbytes)
    whole = {p: own.new_empty(p.slot.shape) for p in members}
    for rank, part in zip(ranks, rows.chunk(context.rest_world), strict=True):
        pieces = part[: sum(numels[rank])].split(numels[rank])
        for parameter, piece in zip(members, pieces, strict=True):
            done, flat = 0, whole[parameter].view(-1)
            for start, stop in parameter.slot.cut.spans(rank):
                flat[start:stop] = piece[done : done + stop - start]
                done += stop - start
    return whole
