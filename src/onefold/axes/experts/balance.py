"""The load-balancing loss over the tokens of all ranks.

The loss is a product of two means over tokens: a mean over ranks of their own losses is another
number, and pushes each rank's batch, rather than all of them, towards balance.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from onefold.errors import ConfigError
from onefold.wire import ranks as meshes


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
    if group.world_size > 1:
        of_ranks = counts.new_empty(group.world_size * len(counts))
        group.all_gather(of_ranks, counts).wait()
        counts = of_ranks.view(group.world_size, -1).sum(0)
    total = counts[-1].clamp_min(1.0)
    share = chances * (group.world_size / total)
    return num_experts * torch.dot(counts[:-1] / total, share)
