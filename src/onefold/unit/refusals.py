"""Errors about one parameter: functions of its fqn and of `where`, this rank in messages."""

from __future__ import annotations

from onefold.errors import StateError, expected


def edited_in_files(unit: str, where: str) -> StateError:
    """The error for a change of weights that rest in a checkpoint's files."""
    return StateError(
        expected(
            f"the weights of unit {unit!r} as their files have them",
            "an edit, or a load of other values",
            where=where,
            hint='offload="disk:PATH" keeps a copy in that folder, which may be edited',
        )
    )


def touched(fqn: str, where: str, got: str) -> StateError:
    """The error for a parameter that was replaced, moved or resized."""
    return StateError(
        expected(
            f"parameter {fqn!r} to be as onefold.shard left it",
            got,
            where=where,
            hint="move, cast and resize a module before onefold.shard; "
            "edit values inside `with onefold.unsharded(module, writeback=True):`",
        )
    )


def deleted(fqn: str) -> StateError:
    """The error for a parameter that outlived its module."""
    return StateError(
        expected(
            f"the sharded module of parameter {fqn!r} to be alive",
            "a parameter whose module was deleted",
            hint="keep the module as long as its parameters are used",
        )
    )


def tensor_hook(fqn: str) -> StateError:
    """The error for `register_hook` on a sharded parameter."""
    return StateError(
        expected(
            f"no tensor hook on sharded parameter {fqn!r}",
            "register_hook, which autograd would never call",
            hint="use register_post_accumulate_grad_hook, or change gradients between backward "
            "and step",
        )
    )


def direct_use(fqn: str, where: str) -> StateError:
    """The error for a gradient that autograd left on a sharded parameter."""
    return StateError(
        expected(
            f"parameter {fqn!r} to be used by its own module, or by functions",
            "a use inside a torch.autograd.Function outside that module",
            where=where,
            hint="pass `weight.view_as(weight)`, or call the function in the module that "
            "owns the weight",
        )
    )


def no_backward(label: str) -> StateError:
    """The error for a gradient that would have to pass a weight that rests packed."""
    return StateError(
        expected(
            "no backward through a weight that rests packed for inference",
            "a backward",
            where=label,
            hint="run the module under torch.no_grad(), or shard it with "
            "Precision(frozen=) to train adapters",
        )
    )


def edit_of_packed(label: str) -> StateError:
    """The error for an edit of numbers that were decoded from packed bytes."""
    return StateError(
        expected(
            "packed weights to be read alone",
            "an edit of coded numbers in a forward",
            where=label,
            hint="edit weights inside `with onefold.unsharded(module, writeback=True):`",
        )
    )


def released(label: str) -> StateError:
    """The error for a matrix of a stack that was kept after its unit was resharded."""
    return StateError(
        expected(
            "a packed matrix to be used while its module runs",
            "one whose bytes were freed",
            where=label,
            hint="take matrices of a stack anew in each forward",
        )
    )


def no_copy(fqn: str) -> StateError:
    """The error for a copy of a sharded parameter, or of a module that holds it."""
    return StateError(
        expected(
            f"parameter {fqn!r} to stay where it is",
            "a copy of it, or of its module",
            hint="copy modules, and add adapters that copy them (modules_to_save, norms), before "
            "onefold.shard; `weight.detach().clone()` copies this rank's rows",
        )
    )


def no_storage(shape: tuple[int, ...]) -> StateError:
    """The error for the memory of a shard, as safetensors asks for it to write a file."""
    return StateError(
        expected(
            "unsharded tensors to write into a file",
            f"this rank's rows of a sharded parameter {list(shape)}",
            hint="save inside `with onefold.unsharded(module):`, or pass "
            "state_dict=onefold.full_state_dict(module); PEFT's save_embedding_layers=True needs "
            "the first",
        )
    )


def mixed_write(label: str) -> StateError:
    """The error for an in-place operation of a sharded tensor and a plain one."""
    return StateError(
        expected(
            f"no in-place operation of {label} with a plain tensor",
            "one, as when adapters are merged",
            hint="run it inside `with onefold.unsharded(module, writeback=True):`",
        )
    )


def lost_write(label: str) -> StateError:
    """The error for an in-place write to a view of gathered rows."""
    return StateError(
        expected(
            f"no write to a part of {label}",
            "an in-place write to a view of gathered rows, which would be lost",
            hint="assign under torch.no_grad(), as in `p[0] = p[0] + 1`, or edit inside "
            "`with onefold.unsharded(module, writeback=True):`",
        )
    )


def why_replaced(fqn: str, where: str) -> str:
    """For the parameter object that a sharded parameter replaced."""
    return expected(
        f"the current object of parameter {fqn!r}",
        "the object that onefold.shard replaced",
        where=where,
        hint="pass the optimizer to onefold.shard, or build optimizers and lists of parameters "
        "from module.parameters() after it",
    )


def why_stale(fqn: str, where: str) -> str:
    """For an unsharded parameter whose bytes are gone."""
    return expected(
        f"unsharded parameter {fqn!r} to be used while its module runs",
        "a use after it was sharded again",
        where=where,
        hint="read module parameters anew, or inside `with onefold.unsharded(module):`",
    )


def why_consumed(fqn: str, where: str) -> str:
    """For a gradient that a step in backward has used up."""
    return expected(
        f"no use for the gradient of {fqn!r} between backward and step",
        "a use after the step in backward has freed it",
        where=where,
        hint="turn Offload.step_in_backward off to clip, scale or read gradients; of "
        "several backwards, put all but the last inside onefold.accumulate(module)",
    )


def replaced_sum(fqn: str, where: str) -> str:
    """For a `.grad` replaced between micro-batches while it hides the sum of the last ones."""
    return expected(
        f"the gradient of {fqn!r} to stay, or to be cleared, between micro-batches",
        "another tensor in its place; the gradients of micro-batches since are not in it yet",
        where=where,
        hint="assign it before the first micro-batch, or after a backward outside of "
        "onefold.accumulate",
    )


def why_no_mean(fqn: str, where: str, *, is_lost: bool) -> str:
    """For a gradient whose sums rest inside the node, or are incomplete (`is_lost`)."""
    got, hint = (
        "sums inside its node, before the last micro-batch",
        "clip, scale and read gradients after a backward outside of onefold.accumulate; to "
        "clear them between micro-batches, zero_grad(set_to_none=True)",
    )
    if is_lost:
        got = "sums of micro-batches that a failed backward left incomplete"
        hint = "call optimizer.zero_grad() and run all micro-batches of the step again"
    mean = f"the gradient of {fqn!r} to be the mean of all ranks"
    return expected(mean, got, where=where, hint=hint)
