"""Laws of `generate()` of transformers on modules whose weights are elsewhere.

The module is held as `HELD` says, and everything else is plain: no Trainer, no flag, no wrapper.
Each rank has prompts of its own. Tokens, logits and streams are those of the resident model, bit
for bit, computed in the same process before.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.generation.streamers import BaseStreamer

import onefold
from onefold.layout.units import repeated_blocks
from tests.adapters.test_huggingface import VOCABULARY, gpt2, llama, mixtral, t5
from tests.support.hf_ranks import run_forks
from tests.support.ranks import seeded
from tests.support.rows import again_but, worlds_in_turn

NEW = 5


def streamed(module: nn.Module) -> nn.Module:
    """From disk, with room for a third of the weights beside the ring of units that move."""
    sizes = [parameter.nbytes for parameter in module.parameters()]
    block = max(sum(p.nbytes for p in block.parameters()) for block in repeated_blocks(module))
    room = 4 * max(block, *sizes) + sum(sizes) // 3
    return onefold.stream(module, budget=room, offload=f"disk:{tempfile.gettempdir()}")


HELD: dict[str, Callable[[nn.Module], nn.Module]] = {
    "stage 3": lambda module: onefold.shard(module, stage=3, timeout=60),
    "stage 0": lambda module: onefold.shard(module, stage=0, timeout=60),
    "stage 1": lambda module: onefold.shard(module, stage=1, timeout=60),
    "stage 2": lambda module: onefold.shard(module, stage=2, timeout=60),
    "streamed": streamed,
    "stage 3 in cpu": lambda module: onefold.shard(module, stage=3, offload="cpu", timeout=60),
}
"""How a module is held. A test that needs ranks to gather takes the first."""

MODELS = {"gpt2": gpt2, "llama": llama, "mixtral": mixtral, "t5": t5}


def built(model: str, seed: int = 0) -> Any:
    """A model of large random weights: of small ones the same token comes again and again."""
    made = seeded(MODELS[model], seed=seed).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.5 / parameter.std())
    return made


class Prompts:
    """The prompts of one rank: as long on each rank, or not."""

    def __init__(self, rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        self.rank = rank
        self.pair = torch.randint(2, VOCABULARY, (2, 4), generator=generator)
        self.uneven = torch.randint(2, VOCABULARY, (1, 3 + 2 * rank), generator=generator)
        self.same = torch.arange(4, 10)[None]
        self.repeated = torch.tensor([[5, 6, 7, 8 + rank, 5, 6, 7]])


Case = Callable[[Any, Prompts], Any]


def greedy(model: Any, prompts: Prompts) -> Any:
    found = plain(model, prompts.pair, output_logits=True, return_dict_in_generate=True)
    return [found.sequences, *found.logits]


def plain(model: Any, prompt: Tensor, **options: Any) -> Any:
    chosen = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return model.generate(prompt, **chosen | options)


def sampled(model: Any, prompts: Prompts) -> Any:
    torch.manual_seed(7)
    return plain(model, prompts.same, do_sample=True, temperature=1.5, top_k=0)


def beams(model: Any, prompts: Prompts) -> Any:
    return plain(model, prompts.pair, num_beams=3, num_return_sequences=2, eos_token_id=3)


def padded(model: Any, prompts: Prompts) -> Any:
    prompt, mask = prompts.pair.clone(), torch.ones(2, 4, dtype=torch.long)
    prompt[0, : 1 + prompts.rank % 2] = 0
    mask[0, : 1 + prompts.rank % 2] = 0
    return plain(model, prompt, attention_mask=mask)


def lengths_differ(model: Any, prompts: Prompts) -> Any:
    """`max_length` counts the prompt: the rank with the longest one has the fewest steps."""
    return plain(model, prompts.uneven, max_new_tokens=None, max_length=9)


def ends_early(model: Any, prompts: Prompts) -> Any:
    """Rank 0 meets its last token at its second step, the others never."""
    without = plain(model, prompts.pair[:1])
    last = int(without[0, -NEW + 1]) if prompts.rank == 0 else None
    return plain(model, prompts.pair[:1], eos_token_id=last)


class _StopAt(transformers.StoppingCriteria):
    def __init__(self, calls: int) -> None:
        self.calls = calls

    def __call__(self, ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.calls -= 1
        return torch.full((len(ids),), self.calls <= 0)


class _Stream(BaseStreamer):
    def __init__(self) -> None:
        self.pieces: list[Tensor] = []
        self.is_ended = False

    def put(self, value: Tensor) -> None:
        self.pieces.append(value.clone())

    def end(self) -> None:
        self.is_ended = True


def stopped_and_streamed(model: Any, prompts: Prompts) -> Any:
    stream = _Stream()
    criteria = [_StopAt(2 + prompts.rank)]
    found = plain(model, prompts.pair[:1], stopping_criteria=criteria, streamer=stream)
    assert stream.is_ended
    return [found, *stream.pieces]


def last_logits(model: Any, prompts: Prompts) -> Any:
    with torch.no_grad():
        return model(prompts.pair, logits_to_keep=2).logits


def chunked(model: Any, prompts: Prompts) -> Any:
    """Each chunk is a pass: prompts are as long on each rank."""
    return plain(model, prompts.pair, prefill_chunk_size=3)


def looked_up(model: Any, prompts: Prompts) -> Any:
    return plain(model, prompts.repeated, prompt_lookup_num_tokens=3, max_new_tokens=8)


def assisted(model: Any, prompts: Prompts) -> Any:
    """A small model of this rank alone proposes tokens; ranks accept different numbers."""
    return plain(model, prompts.repeated, assistant_model=model.onefold_assistant)


CASES: list[Case] = [
    greedy, sampled, beams, padded, lengths_differ, ends_early, stopped_and_streamed, last_logits,
    chunked, looked_up, assisted,
]  # fmt: skip
KEPT = 6  # of them, also inside `onefold.generating`
ENCODERS_LACK = (last_logits, chunked, looked_up, assisted)


def cases_of(model: str) -> list[Case]:
    return [case for case in CASES if model != "t5" or case not in ENCODERS_LACK]


def generations(rank: int, model: str, held: list[str]) -> list[tuple[str, Any, Any]]:
    """What each case gives with a module that is held in each of these ways, and resident."""
    prompts, found = Prompts(rank), []
    resident = built(model)
    assistant = built(model, seed=1)
    resident.__dict__["onefold_assistant"] = assistant
    wanted = [case(resident, prompts) for case in cases_of(model)]
    for way in sorted(held, key=lambda way: way == "streamed"):
        if way == "streamed":  # torch takes another kernel where a weight requires a gradient
            resident.requires_grad_(False)
            wanted = [case(resident, prompts) for case in cases_of(model)]
        module = HELD[way](built(model))
        module.__dict__["onefold_assistant"] = assistant
        for case, expected in zip(cases_of(model), wanted, strict=True):
            found.append((f"{case.__name__}, {way}", case(module, prompts), expected))
        with onefold.generating(module):
            for case, expected in list(zip(cases_of(model), wanted, strict=True))[:KEPT]:
                found.append((f"{case.__name__}, {way}, kept", case(module, prompts), expected))
    return found


def assert_same(found: Any, wanted: Any, name: str) -> None:
    pairs = zip(found, wanted, strict=True) if isinstance(found, list) else [(found, wanted)]
    for one, other in pairs:
        assert torch.equal(one, other), f"{name}: {one} is not {other}"


@again_but("1-gpt2", "2-t5", "3-llama")
@worlds_in_turn
@pytest.mark.parametrize(
    ("world_size", "model"),
    [(1, "gpt2"), (1, "t5"), *((2, model) for model in MODELS), (3, "llama"), (3, "mixtral")],
)
def test_a_module_generates_what_the_resident_model_does(world_size, model):
    held = list(HELD) if world_size == 2 else ["stage 3", "streamed"]
    results = run_forks(world_size, generations, model, held)
    for result in results:
        for name, found, wanted in result:
            assert_same(found, wanted, name)
    drawn = [dict((name, found) for name, found, _ in result) for result in results]
    for other in drawn[1:]:
        assert_same(other["sampled, stage 3"], drawn[0]["sampled, stage 3"], "sampled, by rank")


def with_a_sharded_assistant(rank: int) -> tuple[Tensor, Tensor]:
    prompt = torch.tensor([[5, 6, 7, 8, 5, 6, 7]])
    wanted = plain(built("llama"), prompt, assistant_model=built("llama", seed=1))
    module, assistant = (HELD["stage 3"](built("llama", seed=seed)) for seed in (0, 1))
    return plain(module, prompt, assistant_model=assistant), wanted


def test_ranks_with_one_prompt_may_shard_the_assistant_too():
    """Where prompts differ, ranks ask the assistant a different number of times, or too often."""
    for found, wanted in run_forks(2, with_a_sharded_assistant):
        assert torch.equal(found, wanted)
