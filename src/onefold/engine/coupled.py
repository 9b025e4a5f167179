"""Step optimizers that need all parameters at once, or a closure: D-Adaptation, Prodigy, LBFGS.

D-Adaptation and Prodigy estimate one learning rate from sums over all elements. `summed_rows` makes
a tensor class whose sums are those over the rows of all ranks, so the class's own step runs on the
rows of each rank. It sends a few numbers for each flat group, and keeps no other state.

Classes that call collectives by themselves are found while they are probed (`refuse_messages`).
LBFGS searches over all parameters. `share_losses` lets ranks that hold whole copies search alike.
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any
from weakref import ref

import torch
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from onefold.engine.engine import Engine
from onefold.errors import StateError
from onefold.layout.ledger import Ledger
from onefold.unit.shortage import explained
from onefold.wire.collectives import Group

ADDED = ("sum", "dot", "vdot", "any")
"""Names of functions whose result over all rows is the sum (of `any`: above 0) of the ranks'."""

Replaced = tuple[tuple[Any, ...], dict[str, Any]] | None
"""Arguments of a step in the place of those of its caller, as torch's pre-hooks return them."""


def rows_of_ranks(engine: Engine) -> type[Tensor]:
    """Return `summed_rows` over the ranks of an engine, which the class does not keep alive."""
    return summed_rows(partial(_over_ranks, ref(engine)))


def summed_rows(total: Callable[[Tensor], Tensor]) -> type[Tensor]:
    """Return a class of tensors, the rows of one rank, whose sums are those over all ranks.

    `total` takes this rank's sum, without dimensions, and returns that over all ranks: it waits for
    them. Every rank makes the same sums in the same order. A result of these tensors is one of
    them, but for numbers. Other functions from rows to a number raise `TypeError`,
    and so does counting elements.
    """

    class SummedRows(Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if func.__name__ == "numel":
                raise TypeError("a number of rows is not that over all ranks")
            result = super().__torch_function__(func, types, args, kwargs or {})
            if not (isinstance(result, SummedRows) and _drops_rows(result, args)):
                return result
            with torch._C.DisableTorchFunctionSubclass():
                own = result.as_subclass(Tensor)
                if func.__name__ not in ADDED:
                    raise TypeError(f"{func.__name__} of the rows of one rank is not a sum")
                return total(own.float()) > 0 if func.__name__ == "any" else total(own)

    return SummedRows


def _drops_rows(result: Tensor, args: tuple[Any, ...]) -> bool:
    """True for one number from a tensor of several dimensions or elements."""
    with torch._C.DisableTorchFunctionSubclass():
        return result.dim() == 0 and any(isinstance(arg, Tensor) and arg.dim() > 0 for arg in args)


def share_losses(group: Group, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Replaced:
    """Let a step's closure return the mean loss of all ranks, so that all search alike."""
    optimizer, *rest = args
    closure = rest[0] if rest else kwargs.get("closure")
    if closure is None or group.world_size == 1:
        return None

    def mean_loss() -> Tensor:
        with torch.enable_grad():
            loss = torch.as_tensor(closure()).detach()
        return group.all_reduced(loss) / group.world_size

    return (optimizer, mean_loss), {k: v for k, v in kwargs.items() if k != "closure"}


def evaluate_closure(args: tuple[Any, ...], kwargs: dict[str, Any], ledger: Ledger) -> Replaced:
    """Run a step's closure before the step: its forward and backward need sharded parameters."""
    optimizer, *rest = args
    closure = rest[0] if rest else kwargs.get("closure")
    if closure is None:
        return None
    with torch.enable_grad(), explained(ledger):
        loss = closure()
    rest = {name: value for name, value in kwargs.items() if name != "closure"}
    return (optimizer, EvaluatedClosure(loss, type(optimizer).__name__)), rest


class EvaluatedClosure:
    """A closure that was evaluated before the step, and returns its loss once."""

    def __init__(self, loss: object, name: str) -> None:
        self._losses, self._name = [loss], name
        self._versions: list[tuple[Tensor, int]] = []

    def expect(self, weights: Sequence[Tensor]) -> None:
        """Hold the loss to be that of the weights as they are now."""
        self._versions = [(tensor, tensor._version) for tensor in weights]

    def __call__(self) -> object:
        is_edited = any(tensor._version != version for tensor, version in self._versions)
        if is_edited or not self._losses:
            raise StateError(
                "a step that evaluates its closure once, at the weights before the step",
                f"{self._name}, which evaluates it {'at others' if is_edited else 'again'}",
                hint="an optimizer that needs one gradient a step, such as AdamW",
            )
        return self._losses.pop()


class Sends(BaseException):
    """A step has called a collective. No class catches it as an exception."""


def refuse_messages(frame: FrameType, event: str, _: object) -> None:
    """Raise `Sends` where a collective is called, before it sends: a profiler of Python calls."""
    code = frame.f_code
    if event == "call" and code.co_filename == c10d.__file__ and code.co_name in _COLLECTIVES:
        raise Sends(code.co_name)


_COLLECTIVES = {n for n in dir(c10d) if n.startswith(("all_", "broadcast", "reduce", "gather"))}
SENT = _COLLECTIVES - {"broadcast", "gather", "reduce"}
"""Names that tell in code alone: the others are those of functions as well."""


def _over_ranks(alive: ref[Engine], own: Tensor) -> Tensor:
    """Return the sum of a number over the ranks that hold the rest of the rows. A collective."""
    engine = alive()
    assert engine is not None, "an optimizer steps parameters of a module that is gone"
    group = engine.context.transport.group
    nbytes = -(-2 * (group.world_size - 1) * own.nbytes // group.world_size)
    engine.ledger.sent("optimizer_sum", nbytes)
    return group.all_reduced(own)
