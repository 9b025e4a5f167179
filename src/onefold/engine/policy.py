"""The rules of a schedule, one frozen value for each sharded module. No torch here.

See docs/adr/0003, 0006, 0034 and 0040.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onefold.recipe import Recipe


@dataclass(frozen=True, slots=True)
class UnitFacts:
    """The facts about one unit that decisions depend on.

    `nbytes` are those of its unsharded weights. A resident unit computes on the weights where they
    rest: it is never gathered or freed. A tiled unit is never unsharded as a whole. States of an
    offloaded unit are stepped in the background. Where nodes keep sums of gradients until the last
    micro-batch, a unit without `keeps_sums` is reduced in each, over all ranks.
    """

    nbytes: int = 0
    is_resident: bool = False
    is_tiled: bool = False
    is_offloaded: bool = False
    keeps_sums: bool = True
    is_gathered: bool = field(init=False)  # unsharded as a whole before it is used

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_gathered", not (self.is_resident or self.is_tiled))


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """When to free unsharded weights, gather the next units, and reduce gradients.

    frees_after_forward: stage 3 frees unsharded weights between forward and backward.
    frees_after_backward: otherwise unsharded weights stay until the step (stages 1 and 2).
    gathers_in_order: every rank gathers units in the order of the module, each once a step, and by
        the end of a forward all of them: ranks may use different ones (docs/adr/0034).
    frees_with_gradients: a unit is freed with its last gradient, and what only a hidden output
        refers to stays until the step (one rank: the root's call ends with backward).
    keeps_bytes: the memory of unsharded weights stays over the step, too (docs/adr/0006).
    keeps_gradients: the memory of reduced gradients stays over `zero_grad` (stage 0, where each
        rank holds all of them), unless their states are offloaded to save memory.
    defers_reduction: gradients of all but the last micro-batch rest on their rank (stages 0, 1).
    prefetch: how many units are gathered ahead.
    prefetches_late: in backward, the next unit's gather begins with the current unit's first
        gradient. Backward starts with all activations alive. At the first gradient some are freed,
        and so are the buffers of the last reduction: the peak is lower. A GPU's queue needs the
        gather sooner.
    is_cyclic: forwards follow one another (inference): behind the last unit comes the first one.
    cap: bytes of unsharded weights that may be alive besides the units in use; None: no limit.
    has_second_hop: a collective follows the first hop of a reduction, so every rank finishes
        reductions at the same places in the order.
    sums_rest: the second hop waits for the last micro-batch.
    keeps_second_shard: each node keeps a secondary shard of weights, filled once a step.
    fills_early: this filling begins with forward, for all units.
    steps_in_backward: offloaded units are stepped as soon as they are reduced.
    """

    frees_after_forward: bool
    frees_after_backward: bool
    keeps_bytes: bool
    defers_reduction: bool
    gathers_in_order: bool = False
    frees_with_gradients: bool = False
    keeps_gradients: bool = False
    prefetch: int = 1
    prefetches_late: bool = True
    is_cyclic: bool = False
    cap: int | None = None
    has_second_hop: bool = False
    sums_rest: bool = False
    keeps_second_shard: bool = False
    fills_early: bool = False
    steps_in_backward: bool = False


def policy_of(recipe: Recipe) -> Policy:
    """Return the rules for a recipe's placements, ranks, tiers and wire."""
    inference = recipe.inference
    return Policy(
        frees_after_forward=recipe.frees_after_forward,
        frees_after_backward=not recipe.keeps_gathered,
        gathers_in_order=recipe.keeps_gathered and inference is None,
        frees_with_gradients=recipe.is_alone,
        keeps_bytes=recipe.keeps_gathered,
        keeps_gradients=not recipe.is_sharded and recipe.world_size > 1,
        defers_reduction=recipe.sums_rest,
        prefetch=inference.prefetch if inference else 1,
        prefetches_late=recipe.device_type == "cpu",
        is_cyclic=inference is not None,
        cap=inference.room if inference else None,
        has_second_hop=(not recipe.is_sharded or recipe.reduces_in_hops or recipe.are_replicas),
        sums_rest=recipe.keeps_sums,
        keeps_second_shard=recipe.keeps_weights,
        fills_early=recipe.keeps_weights,
        steps_in_backward=recipe.offload.step_in_backward,
    )
