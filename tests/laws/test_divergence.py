"""Ranks that make different calls: every rank raises an error that says where each rank is."""

from __future__ import annotations

import os
import re
import time

import pytest
import torch

import onefold
from onefold.wire.roll_call import SKIPPED
from tests.support.models import Model, next_token_loss, token_batches
from tests.support.ranks import run_processes, seeded
from tests.support.rows import again_but

pytestmark = pytest.mark.process


def _start(stage, timeout):
    module = seeded(Model)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    onefold.shard(module, optimizer, stage=stage, timeout=timeout)
    return module, optimizer


def _step(module, optimizer):
    next_token_loss(module, token_batches()[0]).backward()
    optimizer.step()
    optimizer.zero_grad()


def save_alone(rank, module, optimizer, folder):
    if rank == 0:
        onefold.save(f"{folder}/checkpoint", module, optimizer)
    _step(module, optimizer)


def load_alone(rank, module, optimizer, folder):
    if rank == 0:
        onefold.load(f"{folder}/checkpoint", module, optimizer)
    _step(module, optimizer)


def evaluate_alone(rank, module, optimizer, folder):
    if rank == 0:
        with torch.no_grad():
            module(token_batches()[0])
    _step(module, optimizer)


def look_at_weights_alone(rank, module, optimizer, folder):
    if rank == 0:
        with onefold.unsharded(module):
            pass
    _step(module, optimizer)


def gather_a_state_dict_alone(rank, module, optimizer, folder):
    if rank == 0:
        onefold.full_state_dict(module)
    _step(module, optimizer)


def one_forward_more(rank, module, optimizer, folder):
    if rank == 0:
        next_token_loss(module, token_batches()[0])
    _step(module, optimizer)


def save_while_the_other_sleeps(rank, module, optimizer, folder):
    if rank == 0:
        onefold.save(f"{folder}/checkpoint", module, optimizer)
    while not os.path.exists(f"{folder}/0"):
        time.sleep(0.1)  # does something else
    raise onefold.WireError("done")


def read_a_gradient_alone(rank, module, optimizer, folder):
    next_token_loss(module, token_batches()[0]).backward()
    if rank == 0:
        with open(f"{folder}/stderr", "w") as file:
            os.dup2(file.fileno(), 2)
        module.embed.weight.grad.norm().full_tensor()
    _step(module, optimizer)


def stop_early(rank, module, optimizer, folder):
    _step(module, optimizer)
    if rank == 0:
        _step(module, optimizer)
    while not os.path.exists(f"{folder}/0"):
        time.sleep(0.1)  # does something else
    raise onefold.WireError("done")


def skip_a_layer(rank, module, optimizer, folder):
    def forward(tokens):
        x = module.embed(tokens)
        for block in module.blocks[2:]:
            x = block(x)
        return module.head(module.norm(x))

    if rank == 0:
        module.forward = forward
    _step(module, optimizer)


def _diverge(rank, body, timeout, folder):
    module, optimizer = _start(3, timeout)
    _step(module, optimizer)
    start = time.monotonic()
    try:
        body(rank, module, optimizer, folder)
        said = "nothing"
    except onefold.WireError as error:
        said = str(error)
    with open(f"{folder}/{rank}.tmp", "w") as file:
        file.write(f"{time.monotonic() - start:.1f}\n{said}")
    os.rename(f"{folder}/{rank}.tmp", f"{folder}/{rank}")
    if body is read_a_gradient_alone:
        os._exit(0)  # which ends the wait of rank 0
    while not all(os.path.exists(f"{folder}/{other}") for other in (0, 1)):
        time.sleep(0.05)


def said(folder, body, timeout=15):
    run_processes(2, _diverge, body, timeout, str(folder))
    found = []
    for rank in (0, 1):
        seconds, *message = (folder / str(rank)).read_text().splitlines()
        assert float(seconds) < timeout + 60  # a busy machine is late, a hang later
        found.append("\n".join(message))
    return found


CALLS = {
    save_alone: r"rank 0: onefold\.save, .*test_divergence\.py:\d+ `onefold\.save\(.*",
    load_alone: r"rank 0: onefold\.load, .*test_divergence\.py:\d+ `onefold\.load\(.*",
    evaluate_alone: r"rank 0: evaluation forward, gather .*:\d+ `module\(token_batches.*",
    look_at_weights_alone: r"rank 0: onefold\.unsharded, .*:\d+ `with onefold\.unsharded.*",
    gather_a_state_dict_alone: r"rank 0: onefold\.full_state_dict, .*:\d+ `onefold\.full_state.*",
    one_forward_more: r"rank 0: forward, gather of .*",
    skip_a_layer: r"rank 0: forward, gather of unit 'blocks\.\d'.*",
}


@again_but("save_alone", "look_at_weights_alone", "skip_a_layer")
@pytest.mark.parametrize("body", CALLS, ids=lambda body: body.__name__)
def test_ranks_that_wait_for_one_another_name_the_line_of_each_once(body, tmp_path):
    """The rank that differs lists all; the other names that line, and is at its own."""
    culprit, other = said(tmp_path, body)
    assert "ranks that wait for one another" in culprit
    first, second = [line for line in culprit.splitlines() if line.startswith("  rank")]
    assert re.match(CALLS[body], first.strip()), first
    assert second.startswith(("  rank 1: forward, gather of", "  rank 1: backward, "))
    assert culprit.splitlines()[-1].startswith("hint: every rank makes the same calls")
    line, hint = other.splitlines()
    assert first.strip().removeprefix("rank 0: ") in line
    assert "got rank 0 elsewhere: " in line
    skipped = SKIPPED * ("gather of unit" in culprit)  # names layerdrop
    assert hint == f"hint: the error of rank 0 lists all ranks{skipped}"
    assert culprit.endswith(skipped)


@again_but("stop_early-forward")
@pytest.mark.parametrize(
    ("body", "call"), [(save_while_the_other_sleeps, "onefold.save"), (stop_early, "forward")]
)
def test_a_rank_that_does_something_else_is_named_at_the_timeout(body, call, tmp_path):
    message = said(tmp_path, body, 4)[0]
    assert "within 4 s" in message
    assert f"rank 0: {call}, " in message
    assert "rank 1: no collective, test_divergence.py:" in message
    assert "`time.sleep(0.1)" in message


def test_a_read_of_a_gradient_on_one_rank_is_named_by_both(tmp_path):
    raised, other = said(tmp_path, read_a_gradient_alone)
    culprit = (tmp_path / "stderr").read_text()  # while torch still waits
    named = [(other, "rank 0 elsewhere"), (culprit, "rank 0"), (raised, "rank 0")]
    for message, name in named:
        assert f"{name}: a collective of torch, test_divergence.py:" in message
        assert "`module.embed.weight.grad.norm().full_tensor()`" in message
    assert "ranks that wait for one another" in culprit
    assert "rank 1: forward, gather of" in culprit
