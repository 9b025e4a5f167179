"""A KV cache in tiers gives `DynamicCache`'s tokens and logits, and moves each token once."""

from __future__ import annotations

import argparse
import copy
import errno
import gc
import os
import random
import resource
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")
import kv_cache
import transformers
from rich.console import Console
from transformers import DynamicCache, EncoderDecoderCache

import onefold
import onefold.hf
from onefold import ConfigError, StateError, TierError
from onefold.inference import kv_tiers
from onefold.inference import token_store as tokens
from onefold.inference.token_store import TokenShape
from onefold.tier import disk
from tests.support.ranks import run_ranks, seeded
from tests.support.rows import again_but

VOCABULARY, LAYERS, PROMPT = 40, 3, 150
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": None, "pad_token_id": 2,
}  # fmt: skip
LLAMA = {
    **COMMON, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a page a sequence and runs of four: as many of them as large contexts have."""
    monkeypatch.setattr(tokens, "BLOCK_NBYTES", 4096)
    monkeypatch.setattr(tokens, "RUN_NBYTES", 4 * 4096)


def llama(**changes: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**LLAMA, **changes}))


def gpt2() -> Any:
    config = transformers.GPT2Config(
        **COMMON, n_positions=512, n_embd=32, n_layer=LAYERS, n_head=2,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def mixtral() -> Any:
    more = {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": None}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**LLAMA, **more))


def gemma() -> Any:
    """Sliding windows in two layers of three."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    more = {"head_dim": 8, "sliding_window": 16, "layer_types": kinds}
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**LLAMA, **more))


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=40, num_layers=LAYERS, num_heads=4,
        pad_token_id=0, eos_token_id=None, decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def prompts(batch: int = 1, length: int = PROMPT) -> Tensor:
    """Repetitive text, so that prompt lookup finds its continuation."""
    generator = torch.Generator().manual_seed(batch)
    phrase = torch.randint(3, VOCABULARY, (batch, 15), generator=generator)
    return phrase.repeat(1, -(-length // 15))[:, :length]


def context_nbytes(model: Any, batch: int, length: int) -> int:
    config = model.config
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * width * 4 * batch * length


def generate(model: Any, cache: Any, batch: int, **options: Any) -> Any:
    ids, mask = prompts(batch), torch.ones(batch, PROMPT, dtype=torch.long)
    for row in range(1, batch):
        mask[row, : 11 * row] = 0
    torch.manual_seed(5)
    return model.generate(
        ids, attention_mask=mask, past_key_values=cache, max_new_tokens=40, output_logits=True,
        return_dict_in_generate=True, **options,
    )  # fmt: skip


def assert_same(found: Any, wanted: Any) -> None:
    assert torch.equal(found.sequences, wanted.sequences)
    assert len(found.logits) == len(wanted.logits)
    assert all(torch.equal(*pair) for pair in zip(found.logits, wanted.logits, strict=True))


MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "greedy": (1, {}),
    "padded batch": (3, {}),
    "sampled": (2, {"do_sample": True, "num_return_sequences": 2}),
    "beams": (2, {"num_beams": 3}),
    "chunks": (1, {"prefill_chunk_size": 37}),
    "lookup": (1, {"prompt_lookup_num_tokens": 5}),
    "assistant": (1, {"assistant_model": "one layer"}),
}


@again_but(
    "llama-greedy", "llama-beams", "llama-assistant", "gpt2-sampled", "gpt2-lookup",
    "mixtral-padded batch", "mixtral-chunks", "gemma-greedy", "gemma-beams", "gemma-assistant",
)  # fmt: skip
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("build", [llama, gpt2, mixtral, gemma])
def test_generate_gives_the_tokens_and_logits_of_dynamic_cache(
    build: Any, mode: str, tmp_path: Path
) -> None:
    """In a context eight times larger than the budget, twice with one object."""
    model = seeded(build).eval()
    batch, options = MODES[mode]
    if "assistant_model" in options:
        options = {"assistant_model": seeded(partial(llama, num_hidden_layers=1)).eval()}
    wide = batch * options.get("num_beams", options.get("num_return_sequences", 1))
    budget = context_nbytes(model, wide, PROMPT) // 8
    config = model.config if build is gemma else None
    cache = onefold.hf.KVCache(budget, disk=tmp_path, config=config)
    wanted = generate(model, DynamicCache(config=config), batch, **options)
    for _ in range(2):
        assert_same(generate(model, cache, batch, **options), wanted)
        report = cache.report()
        assert report.held.get("cpu", 0) <= budget
        assert report.read_nbytes > 0
        cache.reset()


@again_but("options2")
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 5}])
def test_encoder_decoder_models_take_two_caches(options: Any, tmp_path: Path) -> None:
    model = seeded(t5).eval()
    arguments = dict(max_new_tokens=70, output_logits=True, return_dict_in_generate=True)
    wanted = model.generate(prompts(), **arguments, **options)
    own, cross = (onefold.hf.KVCache(4096, disk=tmp_path) for _ in "ab")
    cache = EncoderDecoderCache(own, cross)
    assert_same(model.generate(prompts(), past_key_values=cache, **arguments, **options), wanted)
    assert own.report().read_nbytes > 0
    assert cross.report().read_nbytes > 0
    cross_nbytes = cross.report().written_nbytes
    shape = TokenShape((4, 8), (4, 8), torch.float32)
    whole = PROMPT // shape.block_tokens * shape.block_tokens
    width = options.get("num_beams", 1)
    held = cross.report().held.get("cpu", 0)
    assert cross_nbytes == LAYERS * width * whole * shape.nbytes - held, "written once, all beams"


def passes(model: nn.Module, cache: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids, past_key_values=cache, use_cache=True).logits


@again_but("False")
@pytest.mark.parametrize("is_even", [True, False])
def test_each_token_is_written_once_and_each_pass_reads_what_lies_on_disk(
    is_even: bool, tmp_path: Path
) -> None:
    model, batch, folders = seeded(llama).eval(), 2, [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    shape = TokenShape((2, 8), (2, 8), torch.float32)
    block = shape.block_tokens
    block_nbytes = block * shape.nbytes * batch
    token_nbytes = LAYERS * batch * shape.nbytes
    resident, context = 2, 16  # blocks of each layer
    budget = LAYERS * resident * block_nbytes
    config = model.config if is_even else None
    cache = onefold.hf.KVCache(budget, disk=folders, config=config)
    ids = torch.randint(3, VOCABULARY, (batch, (context + 3) * block), generator=None)
    passes(model, cache, ids[:, : context * block])
    before = cache.report()
    assert before.token_nbytes == token_nbytes == 2 * LAYERS * 2 * 8 * 4 * batch
    assert before.held["cpu"] == budget
    assert before.written_nbytes == context * block * token_nbytes - budget
    assert context * block * token_nbytes == 8 * budget
    near = [[run.tier for run in layer.tokens.runs].count("cpu") for layer in cache.layers]
    assert all(near) == is_even
    for position in range(context * block, (context + 3) * block):
        read = cache.report().read_nbytes
        passes(model, cache, ids[:, position : position + 1])
        settle(cache)
        # a pass reads the far tokens of layers 1 and 2 and, for the next pass, of layer 0
        if position > context * block and (position + 1) % block:
            whole = position // block * block * token_nbytes - budget
            assert cache.report().read_nbytes - read == whole
    after = cache.report()
    assert after.written_nbytes - before.written_nbytes == 3 * block * token_nbytes
    layer = after.tokens * shape.nbytes * batch
    run = write = 4 * 4096
    most = budget + layer + (layer + run) + write + LAYERS * block_nbytes + 64
    assert before.peak_nbytes <= most
    assert after.peak_nbytes <= most


def settle(cache: Any) -> None:
    """Wait until the read-ahead has ended."""
    ahead = cache._tiers._ahead
    for _, transfer in ahead[1]._arriving if ahead else ():
        transfer.wait()


def test_the_next_layer_is_read_while_this_one_computes(tmp_path: Path) -> None:
    model = seeded(llama).eval()
    cache = onefold.hf.KVCache(0, disk=tmp_path)
    passes(model, cache, prompts())
    settle(cache)
    before = cache.report().read_nbytes
    cache.layers[0].update(*(torch.zeros(1, 2, 1, 8) for _ in "kv"))
    assert cache._tiers._ahead[0] == 1, "nothing asked for layer 1 yet"
    until = time.monotonic() + 60
    while cache.report().read_nbytes == before and time.monotonic() < until:
        time.sleep(0.01)
    assert cache.report().read_nbytes > before


def test_any_sequence_of_operations_gives_what_dynamic_cache_holds(tmp_path: Path) -> None:
    """Appends, crops, reorders, repeats, selections and resets, in any order."""
    draw = random.Random(3)
    for trial in range(12):
        ours = onefold.hf.KVCache(draw.choice([0, 1 << 15, 1 << 30]), disk=tmp_path)
        theirs = DynamicCache()
        for _ in range(25):
            held = ours.layers[0].tokens if len(ours) else None
            batch = held.batch if held else draw.choice([1, 2, 3])
            what = draw.choice("aaaaaccrsbx") if ours.get_seq_length() else "a"
            for cache in (ours, theirs):
                state = draw.getstate()
                operate(cache, what, batch, draw)
                if cache is ours:
                    draw.setstate(state)
            assert ours.get_seq_length() == theirs.get_seq_length()
            assert ours.get_mask_sizes(3, 0) == theirs.get_mask_sizes(3, 0)
            if theirs.get_seq_length() and draw.random() < 0.5:
                for mine, other in zip(ours.layers, theirs.layers, strict=True):
                    assert torch.equal(mine.keys, other.keys), (trial, what)
                    assert torch.equal(mine.values, other.values), (trial, what)


def operate(cache: Any, what: str, batch: int, draw: random.Random) -> None:
    length = cache.get_seq_length()
    if what == "a":
        generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
        number = draw.choice([1, 1, 3, 40, 200])
        for layer in range(2):
            keys = torch.randn(batch, number, 2, 8, generator=generator).transpose(1, 2)
            values = torch.randn(batch, 4, number, 4, generator=generator)
            found = cache.update(keys, values, layer)
            assert all(part.is_contiguous() for part in found)
            assert torch.equal(found[1][:, :, length:], values)
    elif what == "c":
        cache.crop(-draw.choice([0, 1, 5, 33, 100]))
    elif what == "r":
        cache.reorder_cache(torch.tensor([draw.randrange(batch) for _ in range(batch)]))
    elif what == "s":
        cache.batch_select_indices(torch.tensor(draw.sample(range(batch), (batch + 1) // 2)))
    elif what == "b":
        cache.batch_repeat_interleave(2 if batch < 4 else 1)
    else:
        cache.reset()


def test_batch_operations_and_small_crops_move_no_bytes_on_disk(tmp_path: Path) -> None:
    cache = onefold.hf.KVCache(0, disk=tmp_path)
    cache.update(*(torch.randn(2, 2, 200, 8) for _ in "kv"), 0)
    before = cache.report()
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(3)
    cache.batch_select_indices(torch.tensor([0, 2, 5]))
    cache.crop(-5)
    after = cache.report()
    assert (after.read_nbytes, after.written_nbytes) == (before.read_nbytes, before.written_nbytes)
    assert after.token_nbytes == 3 * 128


def test_tensors_of_an_inference_mode_do_not_stay(tmp_path: Path) -> None:
    model, cache = seeded(llama).eval(), onefold.hf.KVCache(8192, disk=tmp_path)
    with torch.inference_mode():
        model(prompts(), past_key_values=cache)
    found = passes(model, cache, prompts(1, 20))
    plain = DynamicCache()
    passes(model, plain, prompts())
    assert torch.equal(found, passes(model, plain, prompts(1, 20)))


def test_a_sharded_model_generates_with_a_cache_on_each_rank(tmp_path: Path) -> None:
    wanted = generate(seeded(llama).eval(), DynamicCache(), 2)

    def body(rank: int) -> Any:
        model = seeded(llama).eval()
        onefold.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
        return generate(model, onefold.hf.KVCache(8192, disk=tmp_path), 2)

    for found in run_ranks(2, body):
        assert_same(found, wanted)


@pytest.mark.parametrize("how", ["reset", "deletion"])
def test_disk_space_and_memory_are_free_at_once(how: str, tmp_path: Path) -> None:
    cache = onefold.hf.KVCache(8192, disk=tmp_path)
    passes(seeded(llama).eval(), cache, prompts())
    settle(cache)
    [file] = cache._tiers.files
    fd, gone, ledger = file.fd, weakref.ref(file), cache._tiers.ledger
    assert os.fstat(fd).st_blocks > 0
    assert list(tmp_path.iterdir()) == [], "the file has no name: it ends with the process"
    del file
    gc.disable()
    try:
        if how == "reset":
            cache.reset()
        else:
            del cache
        until = time.monotonic() + 60  # a worker may still hold its last task
        while gone() is not None and time.monotonic() < until:
            time.sleep(0.01)
        assert gone() is None, "without a garbage collection"
    finally:
        gc.enable()
    assert ledger.describe() == "nothing"


def test_a_cache_may_live_until_the_interpreter_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules may have lost their names by then: nothing is done, the system closes the file."""
    file = disk.SwapFile(tmp_path, 0)
    fd = file.fd
    with monkeypatch.context() as names:
        for name in ("os", "suppress"):
            names.setattr(disk, name, None)
        file.__del__(lambda: True)
    assert file.fd == fd
    file.close()


def test_the_benchmark_compares_the_same_tokens(tmp_path: Path) -> None:
    options = argparse.Namespace(layers=1, context=1024, tokens=2, rounds=1)
    result = kv_cache.measure(options, tmp_path)
    [found] = result["rounds"]
    assert found["apart"] == 0
    far = result["case"]["context_nbytes"] - result["case"]["budget"]
    assert far <= found["read_nbytes"] <= far + 4096, "blocks of one token"
    kv_cache.show(Console(), result)


# Bad input


@pytest.mark.parametrize("budget", [-1, 1.5, "2GiB", True, None, float("nan")])
def test_a_budget_that_is_no_number_of_bytes_is_refused(budget: Any, tmp_path: Path) -> None:
    for arguments in ({"budget": budget}, {"budget": 0, "cpu_budget": budget}):
        with pytest.raises(ConfigError, match=r"budget=\) in bytes.*\nhint: "):
            onefold.hf.KVCache(**arguments, disk=tmp_path)


def test_a_path_that_takes_no_file_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "nothing", tmp_path / "file", Path("/proc/self")):
        with pytest.raises(TierError, match=f"disk tier at {path}"):
            onefold.hf.KVCache(0, disk=[tmp_path, path])


def test_a_context_beyond_the_budget_without_a_disk_is_a_named_error() -> None:
    cache = onefold.hf.KVCache(8192)
    with pytest.raises(TierError, match=r"no disk tier.*\nhint: a larger budget"):
        passes(seeded(llama).eval(), cache, prompts())
    with pytest.raises(StateError, match=r"one that failed.*\nhint: reset"):
        passes(seeded(llama).eval(), cache, prompts())


@contextmanager
def file_limit(nbytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_is_full_is_a_named_error_and_reset_repairs(tmp_path: Path) -> None:
    model, cache = seeded(llama).eval(), onefold.hf.KVCache(0, disk=tmp_path)
    with file_limit(16 << 10), pytest.raises(TierError, match="EFBIG") as caught:
        generate(model, cache, 1)
    assert (caught.value.errno, caught.value.path) == (errno.EFBIG, str(tmp_path))
    assert "reset() frees" in caught.value.__notes__[-1]
    with pytest.raises(StateError, match="reset"):
        cache.reorder_cache(torch.tensor([0, 0]))
    cache.reset()
    assert_same(generate(model, cache, 1), generate(model, DynamicCache(), 1))


def test_a_failed_read_names_the_folder_and_the_offset(tmp_path: Path) -> None:
    model, cache = seeded(llama).eval(), onefold.hf.KVCache(0, disk=tmp_path)
    passes(model, cache, prompts())
    settle(cache)
    os.ftruncate(cache._tiers.files[0].fd, 4096)
    with pytest.raises(TierError, match=r"read .* bytes at offset [0-9,]+, got EIO") as caught:
        for _ in range(2):  # what was read ahead is good
            passes(model, cache, prompts(1, 1))
    assert (caught.value.errno, caught.value.path) == (errno.EIO, str(tmp_path))
    assert caught.value.offset is not None


def test_a_cache_of_another_model_or_batch_is_refused(tmp_path: Path) -> None:
    model, cache = seeded(llama).eval(), onefold.hf.KVCache(8192, disk=tmp_path)
    passes(model, cache, prompts())
    for other, batch in ((llama(num_key_value_heads=4), 1), (llama().bfloat16(), 1), (model, 2)):
        with pytest.raises(ConfigError, match=r"as before, got .*layer 0 .*\nhint: .*reset"):
            passes(other.eval(), cache, prompts(batch, 1))
    plain = DynamicCache()
    passes(model, plain, prompts())
    following = prompts(1, 7)
    assert torch.equal(passes(model, cache, following), passes(model, plain, following))
    with pytest.raises(StateError, match="two models share the cache"):
        passes(llama(num_hidden_layers=LAYERS + 1).eval(), cache, following)


def test_what_a_kv_cache_cannot_do_is_refused(tmp_path: Path) -> None:
    cache = onefold.hf.KVCache(8192, disk=tmp_path)
    with pytest.raises(StateError, match="without gradients"):
        llama()(prompts(), past_key_values=cache)
    with pytest.raises(StateError, match="a copy of it"):
        copy.deepcopy(cache)
    with pytest.raises(ConfigError, match="negative"):
        cache.update(*(torch.zeros(1, 1, 1, 8) for _ in "kv"), 0)
        cache.crop(1)
    smaller = onefold.hf.KVCache(8192, disk=tmp_path, config=llama(num_hidden_layers=2).config)
    with pytest.raises(ConfigError, match="a model of 2 layers"):
        passes(llama(), smaller, prompts())
    mixed = transformers.Qwen3NextConfig(num_hidden_layers=4)
    with pytest.raises(ConfigError, match="linear_attention"):
        onefold.hf.KVCache(8192, disk=tmp_path, config=mixed)


def test_transformers_may_compile_no_graph_around_it(tmp_path: Path) -> None:
    cache = onefold.hf.KVCache(8192, disk=tmp_path, config=llama().config)
    assert not cache.is_compileable
    assert cache.is_croppable
    assert cache.get_max_length() == -1
    assert len(cache) == LAYERS
    assert kv_tiers.RUN_NBYTES >= kv_tiers.PIECE_NBYTES
