"""Operations on a running program, each written once for the plain and the sharded process.

A printed script holds the source of those that it uses.
"""

from __future__ import annotations

from contextlib import nullcontext, suppress

import torch
import torch.distributed.checkpoint.state_dict as dcp_state
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import onefold
from tests.support.programs.frame import Process, Value

# training


def train(
    p: Process,
    micros: int = 1,
    deferred: bool = True,
    clip: float | None = None,
    norm_type: float = 2.0,
    zero: bool | None = True,
) -> None:
    """A step of some micro-batches; gradients may be clipped, and are noted."""
    for index, micro in enumerate(p.batch().chunk(micros)):
        with p.accumulating(is_last=index + 1 == micros or not deferred):
            loss = p.loss(micro) / micros
            loss.backward()
        p.note_mean("loss", loss)
    if clip is not None:
        p.note("norm", torch.nn.utils.clip_grad_norm_(p.parameters, clip, norm_type))
    read_gradients(p)
    p.step(zero)


def train_clipped(p: Process, norm_type: float = 2.0) -> None:
    """Clip by Onefold's function."""
    p.loss(p.batch()).backward()
    if p.is_plain:
        norm = torch.nn.utils.clip_grad_norm_(p.parameters, 0.3, norm_type)
    else:
        norm = onefold.clip_grad_norm_(p.model, 0.3, norm_type)
    p.note("norm", norm)
    p.step()


def train_by_layers(
    p: Process, micros: int = 2, order: str = "layers", zero: bool | None = True
) -> None:
    """All micro-batches unit by unit."""
    batches = list(p.batch().chunk(micros))
    if p.is_plain:
        for batch in batches:
            (p.loss(batch) / micros).backward()
    else:
        mine = [part for batch in batches for part in p.parts(batch)]
        onefold.accumulate_layers(
            p.model, mine, lambda out, _: (out.float() - 1).square().mean(), order=order
        )
    read_gradients(p)
    p.step(zero)


def train_by_closure(p: Process) -> None:
    """`optimizer.step(closure)`, with one optimizer."""
    batch = p.batch()

    def closure() -> Tensor:
        for optimizer in p.optimizers:
            optimizer.zero_grad()
        loss = p.loss(batch)
        loss.backward()
        return loss

    for optimizer in p.optimizers:
        loss = optimizer.step(closure)
        p.note_mean("loss", torch.as_tensor(loss))
    p.clear(None)


def train_twice(p: Process) -> None:
    """Two forwards before two backwards, of one graph each."""
    first, second = p.loss(p.batch()), p.loss(p.batch())
    (first / 2).backward()
    (second / 2).backward()
    p.step()


def train_jointly(p: Process) -> None:
    """One backward through two forwards."""
    (p.loss(p.batch()) + p.loss(p.batch()) * 2).backward()
    read_gradients(p)
    p.step()


def train_retained(p: Process) -> None:
    """Two backwards through one graph."""
    loss = p.loss(p.batch())
    loss.backward(retain_graph=True)
    loss.backward()
    p.step()


def train_with_penalty(p: Process, power: int = 2, zero: bool | None = True) -> None:
    """A penalty on all weights, computed by every rank."""
    numbers = [q for q in p.parameters if q.is_floating_point()]
    with p.rounding():
        penalty = sum(q.abs().pow(power).sum().float() for q in numbers)
    penalty = p.mean([penalty] * (p.num_parts if p.is_plain else 1))
    (p.loss(p.batch()) + 1e-2 * penalty).backward()
    read_gradients(p)
    p.step(zero)


def train_on_input_gradient(p: Process, zero: bool | None = True) -> None:
    """A penalty on the gradient of the input: backward of a backward."""
    batch = p.batch()
    parts = [part.requires_grad_() for part in p.parts(batch)]
    losses = []
    for part in parts:
        out = p.model(part).float().square().mean()
        (slope,) = torch.autograd.grad(out, part, create_graph=True)
        losses.append(out + slope.float().square().sum())
    p.mean(losses).backward()
    p.step(zero)


def train_on_weight_gradient(p: Process, zero: bool | None = True) -> None:
    """A penalty on the gradient of the weights, by each rank's own rows."""
    trained = [q for q in p.parameters if q.requires_grad and q.is_floating_point()]
    losses = []
    for part in p.parts(p.batch()):
        out = (p.model(part).float() - 1).square().mean()
        slopes = torch.autograd.grad(out, trained, create_graph=True, allow_unused=True)
        squares = [slope.float().square().sum() for slope in slopes if slope is not None]
        losses.append(out + 0.1 * sum(squares))
    p.mean(losses).backward()
    read_gradients(p)
    p.step(zero)


def train_under_autocast(p: Process) -> None:
    """A forward in bfloat16 by torch's own switch."""
    with torch.autocast("cpu", torch.bfloat16):
        loss = p.loss(p.batch())
    loss.backward()
    p.step()


def train_on_scaled_gradients(p: Process, how: str = "mul_") -> None:
    """Gradients that the user changes between backward and step."""
    p.loss(p.batch()).backward()
    for q in p.parameters:
        if q.grad is None:
            continue
        if how == "mul_":
            q.grad.mul_(0.5)
        elif how == "assign":
            q.grad = q.grad * 0.5
        elif how == "zeros":
            q.grad = torch.zeros_like(q)
        elif how == "sign_":
            q.grad.sign_()
        elif how == "data.sign_":
            q.grad.data.sign_()
        elif how == "set data":
            q.grad.data = q.grad.data.sign()
        else:
            q.grad = None
    p.step()


def train_on_sum(p: Process) -> None:
    """The sum over a rank's rows in place of the mean."""
    losses = [(p.model(part).float() - 1).square().sum() / 64 for part in p.parts(p.batch())]
    loss = p.mean(losses)
    loss.backward()
    p.note_mean("sum", loss)
    read_gradients(p)
    p.step()


def abort_step(p: Process, where: str = "pre") -> None:
    """A step that a user's hook or closure ends by an error, and that is then repeated."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    p.loss(p.batch()).backward()
    for optimizer in p.optimizers:
        if where == "closure":
            with suppress(ZeroDivisionError):
                optimizer.step(fail)
            continue
        pre, post = optimizer.register_step_pre_hook, optimizer.register_step_post_hook
        hook = (pre if where == "pre" else post)(fail)
        with suppress(ZeroDivisionError):
            optimizer.step()
        hook.remove()
    if where != "post":  # there the weights have moved
        p.step()
    p.clear()


def train_on_assigned_gradients(p: Process) -> None:
    """A gradient that was assigned before the first micro-batch stays in the sum."""
    for q in p.parameters:
        if q.requires_grad:
            q.grad = torch.full_like(q, 0.1)
    for index, micro in enumerate(p.batch().chunk(2)):
        with p.accumulating(is_last=index == 1):
            (p.loss(micro) / 2).backward()
    read_gradients(p)
    p.step()


def skip_step(p: Process, zero: bool | None = True) -> None:
    """A backward without a step."""
    p.loss(p.batch()).backward()
    p.clear(zero)


def step_alone(p: Process) -> None:
    """A step without a backward."""
    p.step()


def train_submodule(p: Process, number: int = 0) -> None:
    """Call a block instead of the root."""
    blocks = list(p.model.blocks)
    p.loss(p.batch(), blocks[number % len(blocks)]).backward()
    read_gradients(p)
    p.step()


def train_on_islands(p: Process) -> None:
    """A step whose weights islands average: with plain SGD that of all rows together."""
    loss = p.loss(p.batch())
    loss.backward()
    p.note_mean("loss", loss)
    p.step()
    if p.islands is not None:
        p.islands.step()


# evaluation


def evaluate(p: Process, mode: str = "no_grad") -> None:
    """A forward without a graph."""
    contexts = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
    p.model.eval()
    with contexts.get(mode, nullcontext)():
        loss = p.loss(p.batch())
    p.note_mean(mode, loss.detach().clone())
    p.model.train()


def generate(p: Process) -> None:
    """Two forwards for which units stay gathered."""
    with nullcontext() if p.is_plain else onefold.generating(p.model), torch.no_grad():
        for _ in range(2):
            p.note_mean("generating", p.loss(p.batch()))


def evaluate_unsharded(p: Process) -> None:
    """A forward of whole weights."""
    with p.unsharded(), torch.no_grad():
        p.note_mean("unsharded", p.loss(p.batch()))


def evaluate_average(p: Process) -> None:
    """A forward of averaged weights."""
    if p.average is None:
        return
    if not p.is_plain:
        with p.average.applied(), torch.no_grad():
            p.note_mean("average", p.loss(p.batch()))
        return
    own = [q.detach().clone() for q in p.parameters]
    with torch.no_grad():
        for q, mean in zip(p.parameters, p.average, strict=True):
            q.copy_(mean)
        p.note_mean("average", p.loss(p.batch()))
        for q, value in zip(p.parameters, own, strict=True):
            q.copy_(value)


def take_gradients(p: Process) -> None:
    """`torch.autograd.grad` of a rank's own loss, averaged by the user."""
    trained = [q for q in p.parameters if q.requires_grad]
    grads = torch.autograd.grad(p.loss(p.batch()), trained, allow_unused=True)
    for q, grad in zip(trained, grads, strict=True):
        if q.is_floating_point():  # another rank may have used it
            p.note_mean("taken", torch.zeros(q.shape, dtype=q.dtype) if grad is None else grad)


def fail_in_forward(p: Process) -> None:
    """An exception in the middle of a forward, on every rank, which the user catches."""
    last = list(p.model.children())[-1]  # every rank calls it, which may not hold inside a block
    last = last[-1] if isinstance(last, nn.ModuleList) else last
    hook = last.register_forward_pre_hook(lambda module, args: 1 / 0)
    with suppress(ZeroDivisionError):
        p.loss(p.batch()).backward()
    hook.remove()
    p.model.zero_grad()


def fail_in_backward(p: Process) -> None:
    """An exception in the middle of a backward, which the user catches."""

    def fail(grad: Tensor) -> None:
        raise ZeroDivisionError

    batch = p.batch().requires_grad_()
    batch.register_hook(fail)
    with suppress(ZeroDivisionError):
        p.loss(batch).backward()
    p.model.zero_grad()


# reads


def read_gradients(p: Process) -> None:
    """Every gradient in full."""
    if not p.keeps_gradients:
        return
    for name, q in p.model.named_parameters():
        p.note(f"grad of {name}", q.grad)


def read_weights(p: Process, how: str = "full_tensor") -> None:
    """Every weight in full."""
    if how == "full_tensor" or p.is_plain:
        weights = dict(p.model.named_parameters())
    elif how == "full_state_dict":
        weights = onefold.full_state_dict(p.model, rank0_only=False)
    elif how == "state_dict":
        weights = p.model.state_dict()
    elif how == "torch":
        options = dcp_state.StateDictOptions(full_state_dict=True)
        weights = dcp_state.get_model_state_dict(p.model, options=options)
    else:
        with p.unsharded():
            weights = {n: q.detach().clone() for n, q in p.model.named_parameters()}
    for name, q in p.model.named_parameters():
        p.note(f"{how} {name}", weights[name])
        assert q.shape == weights[name].shape or p.freezes_in_bytes


def read_states(p: Process) -> None:
    """Every element of the optimizers' states that belongs to an element of a weight."""
    names = {q: name for name, q in p.model.named_parameters()}
    for optimizer in p.optimizers:
        if type(optimizer).__name__ in ("Adafactor", "Muon"):
            continue  # the rank that steps a matrix has its states
        for group in optimizer.param_groups:
            for q in group["params"]:
                for key, value in sorted(optimizer.state.get(q, {}).items()):
                    if isinstance(value, Tensor) and value.shape == q.shape and value.dim():
                        p.note(f"{key} of {names[q]}", value)


def read_numbers(p: Process) -> None:
    """Reductions over every weight."""
    for name, q in p.model.named_parameters():
        if not q.numel() or not (q.is_floating_point() or q.is_complex()):
            continue
        with torch.no_grad():
            p.note(f"norm of {name}", q.norm())
            p.note(f"sum of {name}", q.abs().sum())
            if q.is_floating_point():
                p.note(f"max of {name}", q.max())
                p.note(f"mean of {name}", (q * 2).abs().mean())  # else a sum that cancels


def read_shapes(p: Process) -> None:
    """What a summary prints."""
    p.note("numel", float(sum(q.numel() for q in p.parameters)))
    for name, q in p.model.named_parameters():
        p.note(f"{name} {tuple(q.shape)} {q.dtype} {q.requires_grad}", None)


def reload_states(p: Process) -> None:
    """Load a module's and an optimizer's own state dicts."""
    p.model.load_state_dict(p.model.state_dict())
    for optimizer in p.optimizers:
        optimizer.load_state_dict(optimizer.state_dict())


def load_whole_states(p: Process, scale: float = 0.5) -> None:
    """Load a plain state dict of other values."""
    weights: dict[str, Value] = {}
    parameters = p.model.named_parameters() if p.freezes_in_bytes else ()
    in_bytes = {name for name, q in parameters if not q.requires_grad}
    for name, q in p.model.state_dict().items():
        whole = q.full_tensor() if isinstance(q, DTensor) else q
        numeric = whole.is_floating_point() or whole.is_complex()
        weights[name] = whole * scale if numeric and name not in in_bytes else whole.clone()
    p.model.load_state_dict(weights)


def save_and_go_on(p: Process, wait: bool = True) -> None:
    """A checkpoint that is written and not read."""
    if not p.is_plain:
        ticket = onefold.save(f"{p.folder}/aside{p.noted}", p.model, p.optimizers, wait=wait)
        if ticket is not None:
            ticket.wait()


def save_and_return(p: Process) -> None:
    """A step that is undone by a load; gradients are cleared."""
    p.model.zero_grad()
    folder = f"{p.folder}/back{p.batches}"
    if not p.is_plain:
        onefold.save(folder, p.model, p.optimizers)
    p.loss(p.batch()).backward()
    if not p.is_plain:
        for optimizer in p.optimizers:
            optimizer.step()
        p.load(folder)
    p.model.zero_grad()


def save_pretrained_and_load(p: Process) -> None:
    """Weights as safetensors, and back."""
    if not p.is_plain:
        onefold.save_pretrained(p.model, f"{p.folder}/weights{p.noted}")
        onefold.load_pretrained(p.model, f"{p.folder}/weights{p.noted}")


def report(p: Process) -> None:
    """A report in the middle."""
    if not p.is_plain:
        assert str(onefold.report(p.model))


def record(p: Process) -> None:
    """A recorded step."""
    with nullcontext() if p.is_plain else onefold.record(p.model):
        p.loss(p.batch()).backward()
        p.step()


def no_op(p: Process) -> None:
    """Nothing; what the shrinker leaves of a leg."""
    assert isinstance(p.model, nn.Module)
