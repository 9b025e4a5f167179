"""Run all chunks of a prompt through one block before the next one.

`GenerationConfig.prefill_chunk_size` runs the model once for each chunk, so each chunk gathers, or
streams, all weights. Here each chunk is a forward of the model as well, with its own mask and
positions, in a thread of its own: it halts where a block starts, until the chunks before it have
left that block. One thread runs at a time, in the same order on every rank. So any decoder whose
layers fill the cache in their order gives the same keys and values, bit for bit, as chunk by chunk.
"""

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from onefold.engine.engine import Engine
from onefold.engine.forward_threads import OF_THREAD, thread_of
from onefold.engine.registry import find_engine
from onefold.errors import ConfigError


def prefill(
    model: nn.Module, input_ids: Tensor, *, chunk: int, attention_mask: Tensor | None = None
) -> DynamicCache:
    """Compute keys and values of a prompt in chunks; gather each unit once. A collective.

    The last token is left for `generate`, which starts from the cache. Ranks may have prompts of
    different lengths. A chunk's activations are those of `chunk` tokens; besides, each chunk keeps
    its hidden states between two blocks.

    Args:
        model: a decoder of transformers, sharded or not.
        input_ids: the prompt [rows, tokens].
        chunk: tokens of a chunk.
        attention_mask: 0 for padding on the left [rows, tokens].

    Returns:
        The cache of all tokens but the last one, for `generate(past_key_values=)`.

    Raises:
        ConfigError: an encoder-decoder, a chunk below one token.

    Example:
        >>> cache = onefold.hf.prefill(model, ids, chunk=512)
        >>> tokens = model.generate(ids, past_key_values=cache, max_new_tokens=100)
    """
    config: Any = model.config
    if config.is_encoder_decoder or chunk < 1:
        got = "an encoder-decoder" if config.is_encoder_decoder else f"chunk={chunk}"
        hint = "generate() reads a short prompt, or an encoder's input, in one pass"
        raise ConfigError("a decoder, and chunks of one token or more", got, hint=hint)
    cache = DynamicCache(config=config)
    names = inspect.signature(model.forward).parameters
    parts = [part for part in input_ids[:, :-1].split(chunk, dim=1) if part.shape[1]]
    ends = accumulate(part.shape[1] for part in parts)
    forwards = [
        partial(model, **_inputs(part, end, attention_mask, names), past_key_values=cache)
        for part, end in zip(parts, ends, strict=True)
    ]
    engine = find_engine(model)
    if engine is None or not engine.policy.frees_after_forward or len(forwards) < 2:
        with torch.no_grad():
            for forward in forwards:
                forward()
    else:
        _by_block(engine, _block_list(model), _lead(config), forwards)
    return cache


def _inputs(part: Tensor, end: int, mask: Tensor | None, names: Any) -> dict[str, Any]:
    """Arguments of one chunk, which ends before token `end`, as `generate` would make them."""
    inputs: dict[str, Any] = {"input_ids": part, "use_cache": True}
    if "logits_to_keep" in names:
        inputs["logits_to_keep"] = 1
    if mask is not None:
        inputs["attention_mask"] = mask[:, :end]
        if "position_ids" in names:
            positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
            inputs["position_ids"] = positions[:, end - part.shape[1] : end]
    return inputs


def _block_list(model: nn.Module) -> Sequence[nn.Module]:
    """The list of blocks: the one with the most parameters, the outermost of several."""
    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList) and len(part)]
    return list(max(lists, key=lambda m: sum(p.numel() for p in m.parameters()), default=[model]))


def _lead(config: Any) -> int:
    """The first block by which each kind of cache layer was met: masks are made of their lengths.

    A chunk may start once the chunk before it has left that block.
    """
    kinds: list[str] = getattr(config.get_text_config(), "layer_types", None) or [""]
    return max(kinds.index(kind) for kind in set(kinds))


def _by_block(
    engine: Engine, blocks: Sequence[nn.Module], lead: int, forwards: Sequence[Callable[[], Any]]
) -> None:
    """Run forwards block by block; keep units until the last forward is through with them."""
    schedule, before = engine.schedule, engine.schedule.driven.keeps
    everything = frozenset(range(len(engine.units)))
    used = [_units_of(engine, block) for block in blocks]
    tied = {i for i, unit in enumerate(engine.units) for p in unit.parameters if len(p.places) > 1}
    with ExitStack() as stack:
        stack.enter_context(engine.driven(keeps=everything))
        stack.enter_context(torch.no_grad())
        threads = [stack.enter_context(thread_of(forward)) for forward in forwards]
        for block in blocks[lead + 1 :]:
            stack.enter_context(block.register_forward_pre_hook(_halt, prepend=True))
        for stage in range(lead, len(blocks)):
            for thread in threads:
                thread.resume()
            later = frozenset[int]().union(*used[stage + 1 :])
            held = {i for i, unit in enumerate(engine.units) if unit.unsharded.is_held}
            keeps = schedule.driven.keeps - (held - later - tied - before)
            engine.executor.do(schedule.keep(keeps))


def _units_of(engine: Engine, block: nn.Module) -> frozenset[int]:
    known = (engine.by_sharded.get(id(tensor)) for tensor in block.parameters())
    units = {id(parameter.unit) for parameter in known if parameter is not None}
    return frozenset(i for i, unit in enumerate(engine.units) if id(unit) in units)


def _halt(*_: object) -> None:
    thread = OF_THREAD.forward
    assert thread is not None, "the module runs inside prefill alone"
    thread.halt()
