"""Weigh losses by tokens, so that an average over ranks is the mean over all tokens."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from onefold.wire import ranks as meshes
from onefold.wire.collectives import Group
from onefold.wire.ticket import Ticket


def weigh(loss_sum: Tensor, num_tokens: int | Tensor, *, mesh: meshes.MeshChoice = None) -> Tensor:
    """Scale a summed loss so that averaged gradients are those of the mean over all tokens.

    `onefold.shard`, like DDP, averages gradients over ranks. This rank's sum is divided by the
    mean of the ranks' token counts. So the average over ranks is the sum of all token losses
    divided by the number of all tokens, however tokens are spread. A collective. Ranks without
    tokens call it too, with 0, and run backward.

    Args:
        loss_sum: the sum of this rank's token losses, a scalar.
        num_tokens: how many tokens it adds up. With several micro-batches a step: the tokens of
            this rank in all of them, in each call.
        mesh: the ranks that call it: a mesh or a group, such as the data axes of a pipeline's last
            stage. Default: the whole world; ranks of a tensor axis then count alike.

    Returns:
        The scaled loss, a scalar in fp32 or wider; zero if no rank has tokens.

    Example:
        >>> sums = F.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)
        >>> onefold.weigh(sums, (labels != -100).sum()).backward()
    """
    group = meshes.resolve(mesh).everyone
    dtype = torch.promote_types(loss_sum.dtype, torch.float32)  # fp16 ends at 65,504 tokens
    return loss_sum.to(dtype) / mean_count(num_tokens, group, loss_sum.device).to(dtype)


def mean_count(num_tokens: int | Tensor, group: Group, device: torch.device) -> Tensor:
    """Return the mean over the ranks of a count, 1 if it is zero everywhere. A collective."""
    mine = torch.as_tensor(num_tokens, dtype=torch.float64, device=device).reshape(1)
    everyone = mine.new_empty(group.world_size)
    if group.world_size == 1:
        everyone.copy_(mine)
    else:
        work = group.all_gather(everyone, mine.detach())
        Ticket([work], label="an exchange of token counts").wait()
    mean = everyone.mean()
    return cast("Tensor", torch.where(mean > 0, mean, torch.ones_like(mean)))
