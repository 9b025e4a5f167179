"""UnitSpec: the facts about one unit that never change."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from onefold.layout.rows import Layout
from onefold.layout.units import UnitPlan
from onefold.unit.context import MAX_TAG, Context


@dataclass(frozen=True, slots=True, eq=False)
class UnitSpec:
    """Name, dtypes and rows of one unit, for the objects that move its weights and gradients."""

    name: str
    tag: int  # identifies the unit in messages
    described: str  # the unit and this rank, in labels of collectives
    context: Context
    dtype: torch.dtype  # of the parameters
    compute_dtype: torch.dtype
    rest: Layout  # rows of weights, masters, moments and gradients at rest
    wire: Layout  # rows of a gradient's message: cut over all ranks, at stage 0 too
    is_offloaded: bool  # masters and moments rest in tiers.state
    is_resident: bool  # modules compute with the weights at rest: both moves are free
    steps_in_blocks: bool  # in the background, rather than by the optimizer's own step
    is_packed: bool  # bytes of quantised weights, or side tables: never cast or coded, no master
    computes_on_sharded: bool  # one process: modules always show the same parameter
    is_trained: (
        bool  # a parameter required a gradient at first; else a master is made when one does
    )

    @staticmethod
    def of(plan: UnitPlan, context: Context, index: int, *, is_offloaded: bool) -> UnitSpec:
        """The spec of a planned unit; `index` numbers the units of a module."""
        dtype, compute = plan.dtype, context.compute
        casts = compute is not None and dtype.is_floating_point and not plan.is_packed
        compute_dtype = compute if compute is not None and casts else dtype
        near = context.rests_near
        moves = compute_dtype != dtype or plan.is_coded
        is_resident = context.rest_world == 1 and near and not moves
        steps_in_blocks = is_offloaded or not near
        is_alone = context.mesh is None and context.world_size == 1 and context.sources == 1
        shapes = [(owned.fqn, tuple(owned.values.shape)) for owned in plan.members]
        cuts = [owned.model for owned in plan.members if owned.model is not None]
        # by rows: with two hops a node has one range of rows, and a tile consists of rows
        by_rows = context.routes.hops is not None or plan.tile_nbytes > 0
        by_rows |= not all(cut.is_even for cut in cuts)  # model axes: the same dim on all ranks
        wire = Layout.build(
            shapes, context.world_size, context.shares, by_rows=by_rows, has_gaps=not plan.is_packed
        )
        return UnitSpec(
            name=plan.name,
            tag=index % MAX_TAG + 1,
            described=f"unit {plan.name!r} on {context.where}",
            context=context,
            dtype=dtype,
            compute_dtype=compute_dtype,
            rest=wire if context.is_sharded else Layout.build(shapes, 1),
            wire=wire,
            is_offloaded=is_offloaded,
            is_resident=is_resident,
            steps_in_blocks=steps_in_blocks,
            is_packed=plan.is_packed,
            computes_on_sharded=(
                is_resident
                and is_alone
                and not steps_in_blocks
                and not plan.is_multiplied
                and not cuts
            ),
            is_trained=plan.is_trained,
        )

    def on(self, context: Context, *, by_rows: bool) -> UnitSpec:
        """The same unit where `context` cuts its state by other shares."""
        shapes = [(slot.fqn, slot.shape) for slot in self.rest.slots]
        layout = Layout.build(
            shapes, context.world_size, context.shares, by_rows=by_rows,
            has_gaps=not self.is_packed,
        )  # fmt: skip
        return replace(self, context=context, rest=layout, wire=layout)

    def label(self, collective: str) -> str:
        """The name of a collective of this unit, for errors."""
        return f"{collective} of {self.described}"
