"""Mixture-of-experts layers whose experts lie on other ranks of an axis.

    experts = onefold.experts.distribute(model, mesh["expert"])
    onefold.shard(model, optimizer, units=dict.fromkeys(experts, mesh["replica"]))

    block     gate -> experts(hidden_states, top_k_index, top_k_weights) -> ...
    here      gate -> ExpertParallel: dispatch, own experts, combine     -> ...

The block, its gate and its names stay as they are. `mlp.experts.gate_up_proj` becomes a DTensor,
Shard(0) over the expert axis. So checkpoints have one tensor of all experts, whatever the axis.

    rank 0: tokens sorted by expert   | for rank 0 | for rank 1 |     dispatch
    rank 1: received                  | of rank 0  | of rank 1  |     experts run
    rank 0: outputs                   | of rank 0  | of rank 1  |     combine: back, in token order

Nothing is dropped and nothing is padded: messages have as many rows as there are tokens, also none.
Every rank takes part in every message, forward and backward, with or without tokens of its own.
Source: Switch Transformer, arXiv 2101.03961, section 2; dropless: MegaBlocks, arXiv 2211.15841.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.func import functional_call

from onefold.axes.listed_experts import stacked, without_values
from onefold.errors import ConfigError
from onefold.layout.model_axes import dtensor_of
from onefold.layout.ranges import Ranges
from onefold.tier import accelerator
from onefold.wire import ranks as meshes
from onefold.wire.collectives import Group
from onefold.wire.moves import moved, of_ranks


@dataclass(frozen=True, slots=True)
class ExpertAxis:
    """The ranks of an expert axis, and the name of their messages in errors.

    Rank r holds the experts of `ranges[r]`.
    """

    group: Group
    ranges: Ranges
    label: str = "exchange of tokens"

    @property
    def own(self) -> range:
        """The numbers of this rank's experts."""
        return range(*self.ranges[self.group.rank])


def _exchange_rows(
    axis: ExpertAxis, sent: Sequence[int], received: Sequence[int], rows: Tensor
) -> tuple[Tensor]:
    """Send consecutive parts of `rows`, of `sent` rows each, to ranks 0, 1, ...; get `received`."""
    group = axis.group
    if group.world_size == 1:
        return (rows.clone(),)
    width = prod(rows.shape[1:])
    out = rows.new_empty(sum(received), *rows.shape[1:])
    group.agree((axis.label, width), axis.label, out)
    work = group.all_to_all(
        out.view(-1), rows.contiguous().view(-1),
        [num * width for num in received], [num * width for num in sent],
    )  # fmt: skip
    group.wait(work, axis.label)
    return (out,)


def _inverse(order: Tensor) -> Tensor:
    """Return the permutation that undoes `order`."""
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return place


class Routing:
    """The way of one batch of tokens to their experts and back. A collective to make."""

    def __init__(self, index: Tensor, axis: ExpertAxis) -> None:
        """Exchange how many tokens each expert gets.

        Args:
            index: int64 [tokens, choices], the experts of each token.
            axis: the ranks that hold them.
        """
        self._choices = index.shape[-1]
        num_experts, ranks = axis.ranges.extent, axis.group.world_size
        flat = index.reshape(-1)
        self._order = flat.argsort(stable=True)  # pairs of token and choice, by expert
        # a device's own bincount would look for the largest number, and the host wait for it
        counts = flat.new_zeros(num_experts).scatter_add_(0, flat, torch.ones_like(flat))
        lengths = axis.ranges.lengths
        mine = len(axis.own)
        (theirs,) = _exchange_rows(axis, lengths, [mine] * ranks, counts)
        numbers = accelerator.Fetched(torch.cat([counts, theirs])).read()  # the only wait
        own, table = numbers[:num_experts], numbers[num_experts:].view(ranks, mine)
        self.sent = [int(part.sum()) for part in own.split(lengths)]
        self.received: list[int] = table.sum(1).tolist()  # `table`: by sender, of each own expert
        self.of_experts: list[int] = table.sum(0).tolist()
        experts = torch.arange(mine, device=index.device).repeat(ranks)
        self.experts = experts.repeat_interleave(theirs, output_size=sum(self.received))
        """int64 [received rows]: the expert of each, counted from this rank's first."""
        self._there = partial(_exchange_rows, axis, self.sent, self.received)
        self._back = partial(_exchange_rows, axis, self.received, self.sent)

    def dispatch(self, tokens: Tensor) -> Tensor:
        """Return the rows [received, width] of all ranks' `tokens` [n, width] for own experts."""
        return moved(self._there, self._back, tokens[self._order // self._choices])[0]

    def combine(self, outputs: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sums [n, width] of what experts made of this rank's tokens.

        Args:
            outputs: [received, width], of the rows that `dispatch` returned.
            weights: [n, choices].
        """
        (rows,) = moved(self._back, self._there, outputs)
        choices = rows[_inverse(self._order)].view(len(weights), self._choices, rows.shape[-1])
        return (choices * weights.unsqueeze(-1)).sum(1)


NUM_ARGUMENTS = 3
"""Of an experts module's forward: hidden states, indices and weights of the chosen experts."""


class ExpertParallel(nn.Module):
    """Experts of which each rank of an axis holds some; takes the place of all of them.

    Called as the experts of transformers are: `(hidden_states, top_k_index, top_k_weights)`.
    `own_experts` has the numbers of those of this rank.
    A collective over the axis, in forward and in backward: every rank calls it, also with no token.
    Pass it to `onefold.shard(units={...: mesh})` with the mesh of the ranks that hold the same
    experts.

    Example:
        >>> block.experts = onefold.experts.ExpertParallel(block.experts, mesh["expert"])
    """

    def __init__(self, experts: nn.Module, mesh: DeviceMesh | dist.ProcessGroup | None) -> None:
        """Keep this rank's experts.

        Args:
            experts: all experts, alike on every rank. A module with `num_experts` whose parameters
                have one row for each expert; or a `ModuleList` of equal experts, each called with
                rows [n, width]: their parameters are stacked.
            mesh: the expert axis. None: every rank has all experts, under the names that they have
                on an axis, so that a checkpoint of either loads into the other.

        Raises:
            ConfigError: experts of another form, fewer experts than ranks, or listed experts that
                differ in more than values: frozen ones, hooks, other attributes, one of them twice.
        """
        super().__init__()
        group, shown_on = Group.from_handle(None), None
        if mesh is not None:
            group = meshes.of_axis(mesh, "the expert axis").everyone
            shown_on = mesh if isinstance(mesh, DeviceMesh) else _mesh_of(mesh, experts)
        self.stacked: nn.Module | None = None
        is_list = isinstance(experts, nn.ModuleList)
        self.num_experts = len(experts) if is_list else _num_experts(experts)
        ranges = Ranges.over(self.num_experts, group.world_size)
        if ranges.has_empty:
            got = (
                f"{self.num_experts} experts, {ranges.longest} a rank, on {group.world_size} ranks"
            )
            hint = "take fewer ranks for experts; onefold.shard shards weights over ranks as well"
            raise ConfigError("an expert for each rank of the axis", got, hint=hint)
        self.axis = ExpertAxis(group, ranges)
        self.own_experts = self.axis.own
        own = slice(self.own_experts.start, self.own_experts.stop)
        # the module that computes borrows the parameters of this one, and so is no child of it
        if isinstance(experts, nn.ModuleList):
            self.stacked = stacked(experts, own, shown_on)
            self._hidden = [without_values(experts[0])]
        else:
            for name, parameter in experts.named_parameters(recurse=False):
                rows: Tensor = parameter.detach()[own].clone()
                if shown_on is not None:
                    rows = dtensor_of(rows, shown_on, [Shard(0)], parameter.shape)
                self.register_parameter(name, nn.Parameter(rows, parameter.requires_grad))
            inner = without_values(experts)
            inner.num_experts = len(self.own_experts)  # type: ignore[assignment]
            self._hidden = [inner]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts' outputs, in the shape of the input.

        Args:
            hidden_states: [..., width].
            top_k_index: int64 [tokens, choices].
            top_k_weights: [tokens, choices].
        """
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        index = top_k_index.reshape(len(tokens), top_k_index.shape[-1])
        routing = Routing(index, self.axis)
        rows, experts, counts = routing.dispatch(tokens), routing.experts, routing.of_experts
        num_rows = len(rows)
        if num_rows == 0:  # a row of zeros: parameters then have gradients, of zeros
            rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
            experts, counts = experts.new_zeros(1), [1, *counts[1:]]
        outputs = self._compute(rows, experts, counts)[:num_rows]
        mixed = routing.combine(outputs, top_k_weights)
        return mixed.to(hidden_states.dtype).view(hidden_states.shape)

    def connect(self, name: str, group: Group) -> None:
        """Let `onefold.shard` watch the waits of this axis: an error says where every rank is."""
        self.axis = replace(self.axis, group=group, label=f"exchange of tokens of {name!r}")

    def _compute(self, rows: Tensor, experts: Tensor, counts: list[int]) -> Tensor:
        """Return the output [n, width] of the expert of each row; `counts`: rows of each expert."""
        (inner,) = self._hidden
        inner.train(self.training)
        if self.stacked is None:
            shown = {name: _local(p) for name, p in self.named_parameters(recurse=False)}
            arguments = (rows, experts[:, None], torch.ones_like(rows[:, :1]))
            return functional_call(inner, shown, arguments)
        stacked = {name: _local(p) for name, p in self.stacked.named_parameters()}
        order = experts.argsort(stable=True)
        parts = [
            functional_call(inner, {name: p[at] for name, p in stacked.items()}, (part,))
            for at, part in enumerate(rows[order].split(counts))
        ]
        return torch.cat(parts)[_inverse(order)]

    def extra_repr(self) -> str:
        own = self.own_experts
        return f"experts {own.start} to {own.stop - 1} of {self.num_experts}"


def distribute(model: nn.Module, mesh: DeviceMesh | dist.ProcessGroup) -> list[ExpertParallel]:
    """Spread the experts of every mixture-of-experts block over the ranks of an axis, in place.

    Each rank keeps its experts: torch.chunk of all of them. Call it before the optimizer is built,
    with the same model on every rank.

    Args:
        model: one with experts as transformers has them (Mixtral, Qwen-MoE, DeepSeek and others):
            modules with `num_experts`, and stacked parameters.
        mesh: the expert axis.

    Returns:
        The modules that took the place of the experts: units for `onefold.shard`.

    Raises:
        ConfigError: no experts in the model, or fewer experts than ranks.

    Example:
        >>> experts = onefold.experts.distribute(model, mesh["expert"])
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        >>> onefold.shard(model, optimizer, units=dict.fromkeys(experts, mesh["replica"]))

    Source: GShard, arXiv 2006.16668, section 3.
    """
    spread: list[ExpertParallel] = []
    for part in list(model.modules()):
        for name, child in part.named_children():
            if _are_experts(child):
                spread.append(ExpertParallel(child, mesh))
                setattr(part, name, spread[-1])
    if not spread:
        wanted = "a model with stacked experts: modules with `num_experts`, called with hidden "
        wanted += "states, indices and weights"
        hint = "wrap the experts of your own blocks in onefold.experts.ExpertParallel"
        raise ConfigError(wanted, f"a {type(model).__name__} without any", hint=hint)
    return spread


def _are_experts(module: nn.Module) -> bool:
    number = getattr(module, "num_experts", None)
    parameters = list(module.parameters(recurse=False))
    return (
        isinstance(number, int)
        and not isinstance(module, ExpertParallel)
        and bool(parameters)
        and all(p.dim() > 1 and len(p) == number for p in parameters)
        and any(p.dim() > 2 for p in parameters)
        and len(inspect.signature(module.forward).parameters) == NUM_ARGUMENTS
    )


def _num_experts(experts: nn.Module) -> int:
    if not _are_experts(experts):
        wanted = "experts with `num_experts` and a row for each expert in every parameter, or a "
        wanted += "ModuleList of equal experts"
        hint = "forward takes hidden states, the indices and the weights of chosen experts"
        raise ConfigError(wanted, f"a {type(experts).__name__}", hint=hint)
    return experts.num_experts  # type: ignore[return-value]


def _mesh_of(group: dist.ProcessGroup, experts: nn.Module) -> DeviceMesh:
    kinds = {p.device.type for p in experts.parameters()} - {"meta"}
    kind = next(iter(kinds), accelerator.kind() or "cpu")
    return DeviceMesh.from_group(group, kind, mesh_dim_names=("expert",))


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def balance_loss(
    router_logits: Tensor | Sequence[Tensor],
    choices: int,
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Return this rank's part of the load-balancing loss of all ranks' tokens.

    The mean of the parts over the ranks is the loss of one process with all tokens, and so is the
    mean of their gradients, which `onefold.shard` takes: add the part to this rank's loss. One
    collective, on `num_experts + 1` numbers. `output_router_logits=True` of a transformers model
    adds the loss of each rank's own tokens instead: leave `labels` out, or set
    `router_aux_loss_coef` to 0, to add this one.

    Args:
        router_logits: [tokens, experts], of one layer or of several; layers are averaged, as in
            transformers.
        choices: experts of each token (`top_k`).
        mesh: the ranks whose tokens count: the data axis. None: the whole world.
        mask: [tokens], 0 for padding.

    Returns:
        A scalar in fp32 or wider.

    Example:
        >>> loss = loss + 0.01 * onefold.experts.balance_loss(out.router_logits, 2)

    Source: Switch Transformer, arXiv 2101.03961, equations 4 to 6.
    """
    layers = [router_logits] if isinstance(router_logits, Tensor) else list(router_logits)
    if not layers or not all(isinstance(layer, Tensor) and layer.dim() == 2 for layer in layers):
        got = f"{[getattr(layer, 'shape', type(layer)) for layer in layers]}"
        hint = "output_router_logits=True makes transformers return them"
        raise ConfigError("router_logits [tokens, experts] of one layer or several", got, hint=hint)
    group, num_experts = meshes.of_tokens(mesh), layers[0].shape[1]
    dtype = torch.promote_types(layers[0].dtype, torch.float32)
    counts = layers[0].new_zeros(num_experts + 1, dtype=dtype)  # the last one: rows
    chances = layers[0].new_zeros(num_experts, dtype=dtype)
    for logits in layers:
        probabilities = logits.to(dtype).softmax(-1)
        rows = probabilities.new_ones(len(logits)) if mask is None else mask.reshape(-1).to(dtype)
        chosen = probabilities.topk(choices, -1).indices.reshape(-1)
        counts[:-1].scatter_add_(0, chosen, rows.repeat_interleave(choices))
        counts[-1] += rows.sum()
        chances = chances + (probabilities * rows[:, None]).sum(0)
    counts = of_ranks(group, counts, "an exchange of token counts").sum(0)
    total = counts[-1].clamp_min(1.0)
    share = chances * (group.world_size / total)
    return num_experts * torch.dot(counts[:-1] / total, share)
