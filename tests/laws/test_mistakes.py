"""What users do wrong, on real processes: every rank ends in a right result or a named error."""

from __future__ import annotations

import copy
import io
import os
import pickle
import re
import signal
import time
import warnings

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import onefold
from onefold.unit.logical import warn_of_shards
from tests.support.forking import HANG_S, await_ended_threads
from tests.support.models import Model, next_token_loss, token_batches
from tests.support.ranks import _process, run_processes, seeded
from tests.support.rows import again_but

pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf"
    ),  # dynamo
]

LIMIT_S = 10
"""Every rank is to know within these seconds; a busy machine gets some more."""


def adamw(module):
    return torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-4)


def start(stage=3, **options):
    module = seeded(Model)
    optimizer = adamw(module)
    onefold.shard(module, optimizer, stage=stage, **options)
    return module, optimizer


def step(module, optimizer, batch):
    loss = next_token_loss(module, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def own(rank, batch):
    return batch.chunk(2)[rank]


def final_weights(module):
    return onefold.full_state_dict(module, rank0_only=False)


def plain_weights(loss_of=next_token_loss, steps=2):
    """The weights of one process that sees whole batches."""
    module = seeded(Model)
    optimizer = adamw(module)
    for batch in token_batches(steps):
        loss_of(module, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return module.state_dict()


def check_weights(module, wanted):
    for name, value in final_weights(module).items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-5)


def on_both_ranks(body, folder, *args):
    """What each rank said: "right", or the error's class and message."""
    begun = time.monotonic()
    run_processes(2, _outcome, body, str(folder), args)
    assert time.monotonic() - begun < LIMIT_S + 60
    return [(folder / str(rank)).read_text() for rank in (0, 1)]


def _outcome(rank, body, folder, args):
    try:
        body(rank, *args)
        said = "right"
    except onefold.OnefoldError as error:
        said = f"{type(error).__name__}: {error}"
    with open(f"{folder}/{rank}.tmp", "w") as file:
        file.write(said)
    os.rename(f"{folder}/{rank}.tmp", f"{folder}/{rank}")
    while not all(os.path.exists(f"{folder}/{other}") for other in (0, 1)):
        time.sleep(0.05)


# choices


def wrong_stage(rank):
    onefold.shard(seeded(Model), stage=4)


def another_models_optimizer(rank):
    onefold.shard(seeded(Model), adamw(seeded(Model)))


def shard_twice(rank):
    module, optimizer = start()
    onefold.shard(module, optimizer)


def ddp_given(rank):
    onefold.shard(DistributedDataParallel(seeded(Model)))


def ddp_inside(rank):
    onefold.shard(nn.Sequential(DataParallel(seeded(Model))))


def fully_sharded_given(rank):
    from torch.distributed.fsdp import fully_shard

    onefold.shard(fully_shard(seeded(Model)))


def ddp_around(rank):
    DistributedDataParallel(start()[0])


def ddp_around_replicas(rank):
    DistributedDataParallel(start(0)[0])


# the module afterwards


def to_another_dtype(rank):
    start()[0].to(torch.float64)


def half(rank):
    start()[0].half()


def add_a_head(rank):
    module, optimizer = start()
    step(module, optimizer, own(rank, token_batches()[0]))
    module.new_head = nn.Linear(16, 3)
    step(module, optimizer, own(rank, token_batches()[0]))


def replace_the_head(rank):
    module, optimizer = start()
    module.head = nn.Linear(16, 50, bias=False)
    step(module, optimizer, own(rank, token_batches()[0]))


def average_by_deepcopy(rank):
    copy.deepcopy(start()[0])


def averaged_model(rank):
    AveragedModel(start()[0])


ERRORS = {
    wrong_stage: r'ConfigError: expected stage to be 0, 1, 2, 3 or "auto", got 4',
    another_models_optimizer: r"ConfigError: .*AdamW to hold parameters of this module",
    shard_twice: r"ConfigError: .*that is not sharded yet",
    ddp_given: r"ConfigError: .*DistributedDataParallel\nhint: pass the plain module",
    ddp_inside: r"ConfigError: .*DataParallel\nhint: pass the plain module",
    fully_sharded_given: r"ConfigError: .*FSDPModule\nhint: pass the plain module",
    ddp_around: r"StateError: .*DistributedDataParallel around it\nhint: leave",
    ddp_around_replicas: r"StateError: .*DistributedDataParallel around it\nhint: leave",
    to_another_dtype: r"StateError: .*'embed\.weight'.*float64.*rank",
    half: r"StateError: .*'embed\.weight'.*float16.*rank",
    add_a_head: r"StateError: .*'new_head\.weight'.*rank",
    replace_the_head: r"StateError: .*'head\.weight'.*rank",
    average_by_deepcopy: r"StateError: .*full_state_dict.*onefold\.ema",
    averaged_model: r"StateError: .*full_state_dict.*onefold\.ema",
}


@again_but(
    "another_models_optimizer", "ddp_inside", "ddp_around_replicas", "add_a_head", "averaged_model"
)
@pytest.mark.parametrize("body", ERRORS, ids=lambda body: body.__name__)
def test_every_rank_names_the_mistake(body, tmp_path):
    for said in on_both_ranks(body, tmp_path):
        assert re.match(ERRORS[body], said, re.S), said
        assert "\nhint: " in said


# right results


def uneven_batches(rank):
    """Ranks count alike, whatever the number of their rows."""
    module, optimizer = start(2)
    for batch in token_batches(2):
        step(module, optimizer, batch[:8] if rank == 0 else batch[8:])

    def loss_of(module, batch):
        return (next_token_loss(module, batch[:8]) + next_token_loss(module, batch[8:])) / 2

    check_weights(module, plain_weights(loss_of))


def no_accumulate(rank, stage):
    module, optimizer = start(stage)
    for batch in token_batches(2):
        for part in own(rank, batch).chunk(2):
            (next_token_loss(module, part) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    check_weights(module, plain_weights())
    report = onefold.report(module)
    if stage < 2:
        (note,) = report.notes
        assert note.startswith("2 backwards ran before a step without onefold.accumulate")
        assert f"note: {note}" in str(report)
    else:
        assert report.notes == ()  # stages 2 and 3 reduce each micro-batch anyway


def accumulate_as_meant(rank):
    module, optimizer = start(2)
    for batch in token_batches(2):
        first, last = own(rank, batch).chunk(2)
        with onefold.accumulate(module):
            (next_token_loss(module, first) / 2).backward()
        (next_token_loss(module, last) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        next_token_loss(module, first).backward()
        optimizer.zero_grad()  # a step that the script skips
    assert onefold.report(module).notes == ()


def copy_the_module_alone(rank, stage):
    """A shallow copy shares parameters and parts."""
    module, optimizer = start(stage)
    batch = own(rank, token_batches()[0])
    step(copy.copy(copy.copy(module)), optimizer, batch)
    assert copy.copy(module.head).weight is module.head.weight
    for part in (module, module.head):
        for copier in (copy.deepcopy, pickle.dumps, lambda part: torch.save(part, io.BytesIO())):
            with pytest.raises(onefold.StateError, match="to copy or pickle"):
                copier(part)
    same, other = start(stage)
    step(same, other, batch)
    for mine, theirs in zip(module.parameters(), same.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def save_a_state_dict(rank, stage):
    module, optimizer = start(stage)
    step(module, optimizer, own(rank, token_batches()[0]))
    warn_of_shards.cache_clear()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        copied = copy.deepcopy(module.state_dict())
        assert not found
        file = io.BytesIO()
        torch.save(module.state_dict(), file)
        torch.save(module.state_dict(), io.BytesIO())
        torch.save(copied, io.BytesIO())
    assert len(found) == (stage > 0)
    for warning in found:
        assert "onefold.full_state_dict" in str(warning.message)
        assert "onefold.save" in str(warning.message)
        assert warning.filename == __file__
    file.seek(0)
    module.load_state_dict(torch.load(file, weights_only=False))
    module.load_state_dict(copied)


def compile_first(rank, stage):
    module = seeded(Model)
    optimizer, compiled = adamw(module), torch.compile(module, backend="eager")
    compiled(token_batches(1)[0])  # a graph of the plain module is there
    onefold.shard(compiled, optimizer, stage=stage)
    _train_compiled(rank, compiled, module, optimizer)


def compile_in_place_first(rank, stage):
    module = seeded(Model)
    module.compile(backend="eager")
    optimizer = adamw(module)
    onefold.shard(module, optimizer, stage=stage)
    _train_compiled(rank, module, module, optimizer)


def compile_last(rank, stage):
    module, optimizer = start(stage)
    _train_compiled(rank, torch.compile(module, backend="eager"), module, optimizer)


def _train_compiled(rank, compiled, module, optimizer):
    for batch in token_batches(2):
        step(compiled, optimizer, own(rank, batch))
    wanted = plain_weights()
    sharded = compiled if "_onefold_engine" in compiled.__dict__ else module
    with onefold.unsharded(sharded):
        for name, value in module.state_dict().items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-5)


RIGHT = [
    (uneven_batches, ()), (accumulate_as_meant, ()),
    *((no_accumulate, (stage,)) for stage in (0, 1, 2, 3)),
    *((save_a_state_dict, (stage,)) for stage in (0, 1, 3)),
    *((copy_the_module_alone, (stage,)) for stage in (0, 3)),
    (compile_first, (3,)), (compile_in_place_first, (0,)),
    (compile_last, (1,)),  # at every stage in tests/engine/test_compile.py
]  # fmt: skip


@again_but(
    "accumulate_as_meant-()", "no_accumulate-(2,)", "save_a_state_dict-(1,)",
    "copy_the_module_alone-(3,)", "compile_last-(1,)",
)  # fmt: skip
@pytest.mark.parametrize(("body", "args"), RIGHT, ids=lambda v: getattr(v, "__name__", str(v)))
def test_every_rank_has_the_right_result(body, args, tmp_path):
    assert on_both_ranks(body, tmp_path, *args) == ["right", "right"]


# a rank that is gone


def _lose_a_rank(rank, how, lost, then, folder):
    module, optimizer = start(3, timeout=LIMIT_S)
    step(module, optimizer, own(rank, token_batches()[0]))
    if rank == lost:
        how()
    begun = time.monotonic()
    try:
        if then == "onefold.save":
            onefold.save(f"{folder}/saved", module, optimizer)
        for _ in range(3):
            batch = own(rank, token_batches()[0])
            if then == "evaluation forward":
                with torch.no_grad():
                    next_token_loss(module.eval(), batch)
            else:
                step(module, optimizer, batch)
        said = "right"
    except onefold.OnefoldError as error:
        said = f"{type(error).__name__}: {error}"
    with open(f"{folder}/{rank}", "w") as file:
        file.write(f"{time.monotonic() - begun:.1f}\n{said}")
    os._exit(0)


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def ends_early():
    os._exit(0)  # a script whose loop is over


def raises():
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    raise ValueError("a bad row")


@again_but("killed-1-", "raises-0-", "ends_early-1-evaluation forward")
@pytest.mark.parametrize(
    ("how", "lost", "then"),
    [
        *((how, lost, "") for how in (killed, ends_early, raises) for lost in (0, 1)),
        (ends_early, 1, "onefold.save"),
        (ends_early, 1, "evaluation forward"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_other_rank_names_the_loss_of_a_rank(how, lost, then, tmp_path):
    await_ended_threads()
    url = f"file://{tmp_path}/store"
    arguments = (2, url, HANG_S, _lose_a_rank, (how, lost, then, str(tmp_path)))
    context = mp.start_processes(_process, arguments, nprocs=2, join=False, start_method="fork")
    for process in context.processes:
        process.join(HANG_S)
    seconds, said = (tmp_path / str(1 - lost)).read_text().split("\n", 1)
    assert float(seconds) < LIMIT_S + 60
    assert said.startswith(f"WireError: expected {then}"), said
    assert f" to complete, got rank {lost} ended" in said, said
    assert "\nhint: " in said


# generation on one rank


def generate_alone(rank):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    module = seeded(LlamaForCausalLM, config)
    optimizer = adamw(module)
    onefold.shard(module, optimizer, stage=3, timeout=LIMIT_S)
    tokens = torch.arange(8)[None]
    if rank == 0:
        module.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0)
    module(tokens, labels=tokens).loss.backward()


def test_generate_on_one_rank_is_named_by_both(tmp_path):
    pytest.importorskip("transformers")
    culprit, other = on_both_ranks(generate_alone, tmp_path)
    for said in (culprit, other):
        assert said.startswith("WireError: expected all ranks in the same collective"), said
        assert re.search(r"rank 0( elsewhere)?: evaluation forward, .*`module\.generate\(", said)
    assert "rank 1: forward, " in culprit
