"""Laws of one rank in its own dtype: the optimizer steps the parameters that users see."""

import copy

import pytest
import torch
from torch import nn

import onefold
from onefold.engine import bare_step

CLASSES = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.1),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=0.1),
}


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for number in range(steps):
        module(torch.full((3, 4), 0.5 + number)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


Trained = tuple[nn.Module, torch.optim.Optimizer]


def pair(kind: str, stage: int = 3) -> tuple[Trained, Trained]:
    """A sharded module and a plain one, each with an optimizer; fused where torch has that."""
    module, plain = build(), build()
    optimizer, other = (CLASSES[kind](each.parameters()) for each in (module, plain))
    if "fused" in other.defaults:
        other.param_groups[0]["fused"] = True
    onefold.shard(module, optimizer, stage=stage)
    return (module, optimizer), (plain, other)


def assert_equal(module: nn.Module, plain: nn.Module) -> None:
    torch.testing.assert_close([*module.parameters()], [*plain.parameters()], rtol=0, atol=0)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", CLASSES)
def test_weights_and_states_have_the_bits_of_plain_torch(kind, stage):
    ours, plain = pair(kind, stage)
    for each in (ours, plain):
        train(*each)
    assert_equal(ours[0], plain[0])
    states = [[*optimizer.state_dict()["state"].values()] for _, optimizer in (ours, plain)]
    torch.testing.assert_close(*states, rtol=0, atol=0)


def test_a_step_sees_the_parameters_and_states_themselves():
    module = build()
    optimizer = torch.optim.AdamW(module.parameters())
    onefold.shard(module, optimizer, stage=3)
    train(module, optimizer)
    held, states = optimizer.param_groups[0]["params"], dict(optimizer.state)
    train(module, optimizer)
    assert all(a is b for a, b in zip(held, module.parameters(), strict=True))
    assert all(optimizer.state[p] is states[p] for p in held)
    assert optimizer.param_groups[0]["fused"] is None


def test_states_of_plain_torch_go_on():
    plain = build()
    first = torch.optim.AdamW(plain.parameters(), lr=0.1, fused=True)
    train(plain, first)
    module = copy.deepcopy(plain)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    onefold.shard(module, optimizer, stage=3)
    saved = copy.deepcopy(first.state_dict())
    saved["param_groups"][0]["fused"] = None
    optimizer.load_state_dict(saved)
    for each in ((module, optimizer), (plain, first)):
        train(*each)
    assert_equal(module, plain)


def test_a_gradient_that_comes_late_gets_its_momentum():
    """torch's fused SGD takes momentum of all tensors or of none."""
    ours, (plain, other) = pair("SGD")
    other.param_groups[0]["fused"] = False
    for module, optimizer in (ours, (plain, other)):
        module[2].weight.requires_grad_(False)
        train(module, optimizer)
        module[2].weight.requires_grad_(True)
        train(module, optimizer)
    torch.testing.assert_close([*ours[0].parameters()], [*plain.parameters()])


def test_a_step_that_raises_leaves_the_optimizer_as_it_was():
    class Failing(torch.optim.AdamW):
        fails = False

        def _init_group(self, *args, **options):
            if self.fails:
                raise RuntimeError("no")
            return super()._init_group(*args, **options)

    module = build()
    optimizer = Failing(module.parameters(), lr=0.1)
    onefold.shard(module, optimizer, stage=3)
    train(module, optimizer)
    Failing.fails = True
    with pytest.raises(RuntimeError, match="no"):
        train(module, optimizer, 1)
    Failing.fails = False
    optimizer.zero_grad()
    train(module, optimizer)
    assert optimizer.param_groups[0]["fused"] is None
    assert onefold.report(module).steps == 6


def test_parameters_of_no_module_are_stepped_beside():
    module, extra = build(), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([*module.parameters(), extra], lr=0.1)
    onefold.shard(module, optimizer, stage=3)
    (module(torch.ones(3, 4)).sum() + extra.sum()).backward()
    optimizer.step()
    assert not torch.equal(extra, torch.ones(3))
    assert optimizer.state[extra]["step"] == 1


def test_the_ledger_counts_states_that_torch_made():
    module = build()
    optimizer = torch.optim.AdamW(module.parameters())
    onefold.shard(module, optimizer, stage=3)
    train(module, optimizer, 1)
    numel = sum(p.numel() for p in module.parameters())
    assert onefold.report(module).memory["optimizer"]["device"].now == 8 * numel


def test_a_step_without_gradients_and_one_beside_cut_parameters_change_nothing():
    """Between them the optimizer steps stand-ins, and its states are imported."""
    module, cut, plain = build(), build(), build()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    other = torch.optim.AdamW(plain.parameters(), lr=0.1, fused=True)
    onefold.shard(module, optimizer, stage=3)
    train(module, optimizer)
    optimizer.step()
    optimizer.add_param_group({"params": [*cut.parameters()]})
    onefold.shard(cut, optimizer, stage=3, precision="bf16")
    train(module, optimizer)
    optimizer.param_groups.pop()
    train(module, optimizer)
    train(plain, other, 3)
    train(plain, other, 3)
    train(plain, other, 3)
    assert_equal(module, plain)
    assert {int(optimizer.state[p]["step"]) for p in module.parameters()} == {9}


def test_a_checkpoint_goes_on(tmp_path):
    ours, plain = pair("AdamW")
    train(*ours)
    onefold.save(tmp_path / "c", *ours)
    fresh, _ = pair("AdamW")
    onefold.load(tmp_path / "c", *fresh)
    train(*fresh)
    train(*plain)
    train(*plain)
    assert_equal(fresh[0], plain[0])


def test_counters_on_another_device_are_moved_once_in_each_group(monkeypatch):
    """States that users load have them on the CPU, where torch leaves them without fused steps."""
    moved = list[int]()
    move = bare_step.with_numbers_on
    monkeypatch.setattr(bare_step, "with_numbers_on", lambda *a: moved.append(1) or move(*a))
    held = [nn.Parameter(torch.empty(2, device="meta")) for _ in range(2)]
    optimizer = torch.optim.AdamW([{"params": [parameter]} for parameter in held])
    for _ in range(2):
        for parameter in held:
            optimizer.state[parameter] = {"step": torch.zeros(())}
        for group in optimizer.param_groups * 3:
            bare_step._move_numbers(optimizer, group)
    assert all(optimizer.state[p]["step"].device.type == "meta" for p in held)
    assert len(moved) == 4
