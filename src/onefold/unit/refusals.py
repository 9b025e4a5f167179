"""Refused uses of a parameter or unit: what was expected, what came, and a hint."""

from dataclasses import dataclass

from onefold.errors import StateError


@dataclass(frozen=True, slots=True)
class Refusal:
    """Texts of one error; `{}` stands for a name, and `{1}` for further facts."""

    wanted: str
    got: str
    hint: str

    def __call__(self, *facts: object, where: str = "") -> StateError:
        """The error for a parameter, unit or operation; `where` is this rank or a label."""
        wanted, got = self.wanted.format(*facts), self.got.format(*facts)
        return StateError(wanted, got, where=where, hint=self.hint)


EDITED_IN_FILES = Refusal(
    "the weights of unit {!r} as their files have them",
    "an edit, or a load of other values",
    'offload="disk:PATH" keeps a copy in that folder, which may be edited',
)
TWO_KEEPERS = Refusal(
    "one optimizer with a state {1!r} of {0!r}, which is offloaded",
    "a step of another one, and the first has such a state",
    "delete the first optimizer, or keep states on the device: offload=None",
)
TOUCHED = Refusal(
    "parameter {0!r} to be as onefold.shard left it",
    "{1}",
    "move, cast and resize a module before onefold.shard; "
    "edit values inside `with onefold.unsharded(module, writeback=True):`",
)
TILED_INSIDE = Refusal(
    "backward outside of onefold.unsharded",
    "one inside, of {!r}, whose gradient Offload.tile reduces in row blocks",
    "run it outside of the block, or raise Offload.tile above the weight",
)
NO_MEAN_INSIDE = Refusal(
    "the gradient of {!r} to be used after onefold.unsharded",
    "a use inside the block, where it is not averaged yet",
    "step and clip after the block; plain parameters show this rank's gradients",
)
LATE_BACKWARD = Refusal(
    "backward inside onefold.unsharded, as its forward was",
    "one of {!r} after the block",
    "run both inside the block, or both outside",
)
EARLY_FORWARD = Refusal(
    "backward outside of onefold.unsharded, as its forward was",
    "one of unit {} inside the block",
    LATE_BACKWARD.hint,
)
COMPUTED = Refusal(
    "parameter {!r} in its module while the unit is gathered",
    "computed values in its place, as torch.func.functional_call puts there",
    "units=[] makes the module one unit, in which other modules may be called with such values",
)
DELETED = Refusal(
    "the sharded module of parameter {!r} to be alive",
    "a parameter whose module was deleted",
    "keep the module as long as its parameters are used",
)
TENSOR_HOOK = Refusal(
    "no tensor hook on sharded parameter {!r}",
    "register_hook, which autograd would never call",
    "use register_post_accumulate_grad_hook, or change gradients between backward and step",
)
DIRECT_USE = Refusal(
    "parameter {!r} to be used by its own module, or by functions",
    "a use inside a torch.autograd.Function outside that module",
    "pass `weight.view_as(weight)`, or call the function in the module that owns the weight",
)
NO_BACKWARD = Refusal(
    "no backward through a weight that is packed for inference",
    "a backward",
    "run the module under torch.no_grad(), or shard it with Precision(frozen=) to train adapters",
)
TILED_GRAPH = Refusal(
    "a backward without create_graph through tiled weight {!r}",
    "one that builds a graph",
    "leave Offload.tile out to differentiate twice",
)
EDIT_OF_PACKED = Refusal(
    "packed weights to be read alone",
    "an edit of quantized numbers in a forward",
    "edit weights inside `with onefold.unsharded(module, writeback=True):`",
)
RELEASED = Refusal(
    "a packed matrix to be used while its module runs",
    "one whose bytes were freed",
    "take matrices of a stack again in each forward",
)
NO_COPY = Refusal(
    "parameter {!r} to stay where it is",
    "a copy of it, or of its module",
    "copy modules, and add adapters that copy them (modules_to_save, norms), before "
    "onefold.shard; `weight.detach().clone()` copies this rank's rows",
)
MODULE_COPY = Refusal(
    "a module that is not sharded to copy or pickle",
    "a sharded one",
    "onefold.save saves it, onefold.full_state_dict(module) returns plain tensors, and "
    "onefold.ema(module) keeps an average; copy a module before onefold.shard",
)
NO_STORAGE = Refusal(
    "unsharded tensors to write into a file",
    "this rank's rows of a sharded parameter {}",
    "save inside `with onefold.unsharded(module):`, or pass "
    "state_dict=onefold.full_state_dict(module); PEFT's save_embedding_layers=True needs the first",
)
REPLACED_SUM = Refusal(
    "the gradient of {!r} to stay, or to be cleared, between micro-batches",
    "another tensor in its place; the gradients of micro-batches since are not in it yet",
    "assign it before the first micro-batch, or after a backward outside of onefold.accumulate",
)
MIXED_WRITE = Refusal(
    "an elementwise in-place operation of {} with a plain tensor",
    "{1}",
    "run it inside `with onefold.unsharded(module, writeback=True):`",
)
UNREADABLE = Refusal(
    "an operation that DTensor defines on the rows of {}",
    "{1}()",
    "call it on `.full_tensor()`, or inside `with onefold.unsharded(module):`",
)
LOST_WRITE = Refusal(
    "no write to a part of {}",
    "an in-place write to a view of gathered rows, which would be lost",
    "assign under torch.no_grad(), as in `p[0] = p[0] + 1`, or edit inside "
    "`with onefold.unsharded(module, writeback=True):`",
)
REPLACED = Refusal(
    "the current object of parameter {!r}",
    "the object that onefold.shard replaced",
    "pass the optimizer to onefold.shard, or build optimizers and lists of parameters "
    "from module.parameters() after it",
)
QUANTIZED_COPY = Refusal(
    "the quantized bytes of frozen parameter {!r}",
    "a tensor of shape {1}",
    "edit inside `with onefold.unsharded(module, writeback=True):`, or before onefold.shard",
)
QUANTIZED_EDIT = Refusal(
    "no edit in place of frozen parameter {!r}",
    "{1}() on its quantized numbers",
    QUANTIZED_COPY.hint,
)
STALE = Refusal(
    "unsharded parameter {!r} to be used while its module runs",
    "a use after it was sharded again",
    "read module parameters again, or inside `with onefold.unsharded(module):`",
)
CONSUMED = Refusal(
    "no use for the gradient of {!r} between backward and step",
    "a use after the step in backward has freed it",
    "turn Offload.step_in_backward off to clip, scale or read gradients; of "
    "several backwards, put all but the last inside onefold.accumulate(module)",
)
STEPPED_FOR_BOTH = Refusal(
    "each optimizer to step once after each backward, as backward steps unit {!r} for all of them",
    "another backward or a save, while some optimizer has not stepped",
    "turn Offload.step_in_backward off to step some of several optimizers, or in turn",
)
CHANGED = Refusal(
    "the weights of unit {!r} to be the same in backward as in forward",
    "weights that changed in between",
    "run backward before the optimizer steps or weights are loaded",
)
TORN = Refusal(
    "a backward that ran to its end, as it steps units on its way",
    "a backward that failed: some weights are stepped and others are not",
    "load the last checkpoint with onefold.load",
)
STEP_INSIDE = Refusal(
    "no optimizer.step() inside a backward, except in a hook of its own",
    "one that holds {!r}",
    "step after backward, or in a hook of register_post_accumulate_grad_hook without "
    "Offload.step_in_backward",
)
STEPPED_TOO_EARLY = Refusal(
    "a hook to step parameters whose gradients are complete",
    "a step of {0!r} in the hook {1}, before its gradient has come",
    "hooks run from the last unit to the first: step each parameter in its own hook, several in "
    "the last of their hooks, or all of them after backward",
)
NO_MEAN_YET = Refusal(
    "the gradient of {!r} to be the mean of all ranks",
    "sums inside its node, before the last micro-batch",
    "clip, scale and read gradients after a backward outside of onefold.accumulate; to "
    "clear them between micro-batches, zero_grad(set_to_none=True)",
)
LOST_MEAN = Refusal(
    "the gradient of {!r} to be a sum of whole backwards",
    "a sum to which a failed backward has added, or not",
    "call optimizer.zero_grad() and run all micro-batches of the step again",
)
