"""Split the sequences of transformers models: their masks, positions, labels and losses.

Nothing of transformers is patched. `AttentionInterface` and `AttentionMaskInterface` get an entry
of ours by their public `register`, and a split model is switched to it by its public
`set_attn_implementation`, until the split is removed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import (
    AttentionMaskInterface,
    causal_mask_function,
    find_packed_sequence_indices,
    packed_sequence_compatibility_function,
    sdpa_mask,
)

from onefold.axes.sequence.attention_calls import (
    IGNORED,
    Arguments,
    Calls,
    SequencePieces,
    cut_tensors,
    main_tensor,
    takes,
)
from onefold.engine.registry import find_engine
from onefold.errors import ConfigError, StateError
from onefold.wire.collectives import Group
from onefold.wire.moves import mean_count
from onefold.wire.ranks import of_tokens

NAME = "onefold_sequence"
"""The attention implementation of split models."""

_LAYERS = {"full_attention", "sliding_attention"}
_POOLING = ("ForSequenceClassification", "ForMultipleChoice", "ForNextSentencePrediction")
_REFUSED = ("softcap", "position_bias", "s_aux", "cache")


@dataclass(frozen=True)
class _Whole:
    """Whole rows of the present forward, padded to the length of all pieces.

    `mask`, if the caller gave one, and `padding`: [rows, positions], True for tokens. `positions`
    tell documents apart that are packed into a row, where the caller gave no mask.
    """

    num_positions: int
    mask: Tensor | None
    padding: Tensor | None
    positions: Tensor | None


_PRESENT: ContextVar[_Whole | None] = ContextVar("onefold_sequence", default=None)


def attention(  # noqa: PLR0913 - the interface of transformers
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attend by torch's function, which the split replaces; heads are not repeated before it."""
    refused = [name for name in _REFUSED if kwargs.get(name) is not None]
    if refused:
        hint = "choose a model whose attention F.scaled_dot_product_attention can compute"
        wanted = "plain attention in a split sequence"
        raise ConfigError(wanted, ", ".join(refused), hint=hint)
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    is_token = query.shape[2] == 1 < key.shape[2]  # with a cache, while the model is not split
    is_causal = is_causal and attention_mask is None and not is_token
    mixed = F.scaled_dot_product_attention(
        query, key, value, attention_mask, dropout, is_causal,
        scale=scaling, enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return mixed.transpose(1, 2).contiguous(), None


def mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None, **kwargs: Any,
) -> Tensor | None:  # fmt: skip
    """Build the mask of whole rows from those of the present forward."""
    whole = _PRESENT.get()
    if whole is None:
        arguments = (batch_size, q_length, kv_length, q_offset, kv_offset, mask_function)
        return sdpa_mask(*arguments, attention_mask=attention_mask, **kwargs)
    if kwargs.get("use_vmap"):
        wanted = "masks of positions, windows and padding in a split sequence"
        hint = "pass a whole mask [rows, 1, positions, positions] as attention_mask"
        raise ConfigError(wanted, "a mask function of the model's own", hint=hint)
    if "allow_is_bidirectional_skip" in kwargs:
        padding = whole.mask if whole.mask is not None else whole.padding
    else:
        padding = whole.mask
        if whole.positions is not None:
            documents = find_packed_sequence_indices(whole.positions)
            if documents is not None:
                mask_function = packed_sequence_compatibility_function(
                    mask_function, whole.positions, documents
                )
                kwargs["allow_is_causal_skip"] = False
    length = whole.num_positions
    return sdpa_mask(
        batch_size, length, length, 0, 0, mask_function, attention_mask=padding, **kwargs
    )


def calls_of(module: nn.Module, group: Group, inputs: bool) -> TransformersCalls | None:
    """How a module that is or wraps a model of transformers is called; None for others."""
    model = next((part for part in module.modules() if isinstance(part, PreTrainedModel)), None)
    if model is None:
        return None
    if not inputs or not takes(module, "position_ids"):
        wanted = "a model of transformers, or a wrapper whose forward takes the same arguments"
        got = "inputs=False" if not inputs else f"a {type(module).__name__} around one"
        hint = "split the model of transformers itself, with its inputs"
        raise ConfigError(wanted, got, hint=hint)
    if getattr(getattr(module, "active_peft_config", None), "is_prompt_learning", False):
        wanted = "adapters that leave rows as long as they are"
        hint = "use LoRA: each rank would put learned prompts before its piece"
        raise ConfigError(wanted, "learned prompts of PEFT", hint=hint)
    return TransformersCalls(module, model, group)


class TransformersCalls(Calls):
    """Calls of a model of transformers, which may be wrapped, by PEFT for example."""

    has_own_masks = True

    def __init__(self, module: nn.Module, model: PreTrainedModel, group: Group) -> None:
        _check_model(model)
        self._module, self._model = ref(module), ref(model)
        self._parts = group.world_size
        self._before = model.config._attn_implementation or "sdpa"
        if self._parts == 1:
            return
        AttentionInterface.register(NAME, attention)
        AttentionMaskInterface.register(NAME, mask)
        model.set_attn_implementation(NAME)
        if model.config._attn_implementation != NAME:
            wanted = "a model whose attention transformers can switch"
            hint = "its class must call ALL_ATTENTION_FUNCTIONS.get_interface"
            raise ConfigError(wanted, type(model).__name__, hint=hint)

    def local(self, whole: Arguments, pieces: SequencePieces) -> Arguments:
        model, main = self._model(), main_tensor(whole)
        assert model is not None, "a forward outlived its model"
        _check_call(model, whole)
        arguments = dict(whole)
        if arguments.get("position_ids") is None:
            arguments["position_ids"] = torch.arange(pieces.length, device=main.device)[None]
        if arguments.get("attention_mask") is None and self._parts > 1:
            # keeps the model from looking for documents in this rank's positions
            arguments["attention_mask"] = main.new_ones(main.shape[:2], dtype=torch.int64)
        if takes(model, "use_cache"):
            arguments["use_cache"] = False
        labels, shifted = arguments.pop("labels", None), arguments.pop("shift_labels", None)
        local = {name: cut_tensors(value, main, pieces) for name, value in arguments.items()}
        if labels is not None:
            own = pieces.labels(labels if shifted is None else shifted, shift=shifted is None)
            local |= {"labels": own, "shift_labels": own}
            local["num_items_in_batch"] = self._count_tokens(
                own, arguments.get("num_items_in_batch")
            )
        return local

    def _count_tokens(self, own: Tensor, count: Any) -> Any:
        """Return what the model shall divide the sum of its token losses by."""
        if count is not None:  # counted over whole rows, which each rank of a sequence has
            return count / self._parts
        engine = find_engine(self._module())
        group = of_tokens(None) if engine is None else engine.group
        return mean_count((own != IGNORED).sum(), group, own.device).float()

    @contextmanager
    def around(self, whole: Arguments, pieces: SequencePieces) -> Iterator[None]:
        if self._parts == 1:
            yield
            return
        token = _PRESENT.set(_whole_rows(whole, pieces))
        try:
            yield
        finally:
            _PRESENT.reset(token)

    def outputs(self, outputs: Any) -> Any:
        """Drop a pooled output: it is made from the first position, which one rank has."""
        if self._parts > 1 and getattr(outputs, "pooler_output", None) is not None:
            outputs.pooler_output = None
        return outputs

    def remove(self) -> None:
        model = self._model()
        if model is not None and self._parts > 1:
            model.set_attn_implementation(self._before)


def _whole_rows(whole: Arguments, pieces: SequencePieces) -> _Whole:
    main, rows = main_tensor(whole), whole.get("attention_mask")
    more, padding, positions = (0, pieces.padding), None, None
    if isinstance(rows, Tensor) and rows.ndim == 2:
        rows = F.pad(rows.bool(), more, value=False)
    else:
        rows = None
        positions = whole.get("position_ids")
        if positions is not None:
            positions = F.pad(positions.expand(main.shape[0], -1), more)
    if pieces.padding:
        padding = F.pad(main.new_ones(main.shape[:2], dtype=torch.bool), more, value=False)
    return _Whole(pieces.padded, rows, padding, positions)


def _check_model(model: PreTrainedModel) -> None:
    config, name = model.config, type(model).__name__
    others = set(getattr(config, "layer_types", None) or ()) - _LAYERS
    reason = ""
    if name.endswith(_POOLING):
        reason = "which reads the output of one position"
    elif config.is_encoder_decoder or config.sub_configs:
        reason = "which has several parts, with sequences of their own"
    elif others:
        reason = f"with layers of {', '.join(sorted(others))}"
    if reason:
        wanted = "one encoder or decoder whose attention is full or windowed"
        hint = "split the encoder or decoder inside, and compute the rest from sequence.gather"
        raise ConfigError(wanted, f"{name}, {reason}", hint=hint)


def _check_call(model: PreTrainedModel, arguments: Arguments) -> None:
    cached = ("past_key_values", "encoder_hidden_states", "logits_to_keep", "use_cache")
    for name in cached:
        value = arguments.get(name)
        if value is not None and not (isinstance(value, int) and not value):
            wanted = "a forward over whole rows, without a cache or another sequence"
            hint = "call remove() of the split's handle before generate"
            raise StateError(wanted, f"{name}=", hint=hint)
    if arguments.get("output_router_logits", getattr(model.config, "output_router_logits", False)):
        wanted = "losses that are sums over tokens"
        hint = "pass output_router_logits=False: each rank would balance its own tokens"
        raise ConfigError(wanted, "the auxiliary loss of a router", hint=hint)
    counts = any(
        callable(getattr(p, "create_position_ids_from_input_ids", None)) for p in model.modules()
    )
    if counts and arguments.get("position_ids") is None:
        wanted = f"position_ids, which {type(model).__name__} counts without padding"
        hint = "pass them for whole rows"
        raise ConfigError(wanted, "none", hint=hint)
    if arguments.get("labels") is not None and not _sums_tokens(model):
        wanted = "no labels for a model whose loss is a mean over this rank's tokens"
        hint = "call it without labels; compute the loss from sequence.labels(labels, shift=False)"
        raise ConfigError(wanted, f"labels for {type(model).__name__}", hint=hint)


def _sums_tokens(model: PreTrainedModel) -> bool:
    """True if the model's own loss takes shifted labels and the number to divide by."""
    taken = inspect.signature(model.loss_function).parameters
    return takes(model, "shift_labels") and {"shift_labels", "num_items_in_batch"} <= set(taken)
