"""The surface that programs are drawn from: expressions, and how often each is drawn."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from tests.support.modules import MODULES

BLOCKS = (
    "nn.Linear(8, 8)", "nn.Linear(8, 8)", "nn.Linear(8, 8, bias=False)", "Residual()",
    "Residual()", "Residual(33)", "Residual(1, bias=False)", 'Normed("layer")', 'Normed("rms")',
    'Normed("group")', 'Normed("instance")', 'Normed("batch")', 'Normed("local")', "Convolved()",
    'Convolved("transposed")', 'Convolved("depthwise")', 'Convolved("Conv2d")', "Embedded()",
    'Embedded("bag")', 'Embedded("padded")', "Embedded(rows=2)", "TiedHead()",
    'TiedHead("linear")', 'TiedHead("matmul")', "Recurrent()", 'Recurrent("GRU", 2)',
    'Recurrent("RNN", 1, True)', 'Recurrent("LSTM", 2, True)', "Cells()", 'Cells("LSTMCell")',
    "Attends()", 'Attends("encoder")', "Odd(())", "Odd((), (0,), (0, 3), (3, 0))", "Odd((1,))",
    "Odd((1, 8), (2, 8), (5, 1, 1, 3))", "Odd((7, 3), (13,))", "Named()", "Filtered()", "Frozen()",
    "Frozen(1)", "nn.Linear(8, 8).requires_grad_(False)", "Unused()", "Shared()", "Shared(1)",
    "Borrowed()", "Borrowed(False)", "Buffered()", "Experts()", "Experts(7)",
    "Experts(2, dense=True)", "Stacked()", "Stacked(2)", "Packed()", 'Packed("tuple")',
    "InPlace()", "Detached()", 'Detached("detach")', "Mixed()", 'Mixed("bfloat16")',
    "Parametrized()", 'Parametrized("orthogonal")', 'Parametrized("old")', "Rebuilt()",
    "Hooked()", 'Hooked("pre")', 'Hooked("backward")', "Gated()", "nn.PReLU(8)", "nn.PReLU()",
    "nn.Tanh()",
    "nn.Sequential(nn.Linear(8, 5), nn.GELU(), nn.Linear(5, 8))",
)  # fmt: skip

POOL = 3000
"""Seeds below it draw from `BLOCKS` alone: their programs, and what was recorded of them, stay."""
_LATER = (
    'Attends("cross")', "Clamped()", 'Clamped("clamp")', "Positioned()", "Positioned(1)",
    "Passed()", "Scaling()", "Experts(4, skips=True)", "Unpacked()",
    *(f'Unpacked("{kind}")' for kind in ("list", "nested", "dataclass", "object",
                                         "object with slots", "namespace", "user dict")),
)  # fmt: skip
_OF_LAWS = [text for law in MODULES.values() for text in law.drawn_texts]
_NEW = [text for text in dict.fromkeys(_OF_LAWS) if text not in (*BLOCKS, *_LATER)]
LATER_BLOCKS = (*_LATER, *(f"Fitted({text})" for text in _NEW))
"""Blocks of the other seeds; the laws' modules may return rows of fewer columns."""

WRAPPERS = (
    *("Recomputed({})", "Recomputed({}, reentrant=True)", "Chain({})", "Chain({})") * 2,
    "Functional({})", "Functional({}, 0.5)",
)  # fmt: skip

OPTIMIZERS = (
    "torch.optim.SGD(ps, lr=0.05)", "torch.optim.SGD(ps, lr=0.05)",
    "torch.optim.SGD(ps, lr=0.05, momentum=0.9)",
    "torch.optim.SGD(ps, lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.1)",
    "torch.optim.SGD(ps, lr=0.01, maximize=True)",
    "torch.optim.SGD(ps, lr=0.05, momentum=0.9, dampening=0.5, foreach=True)",
    "torch.optim.SGD(ps, lr=0.05, fused=True)",
    "torch.optim.Adam(ps, lr=0.01, eps=1e-4)", "torch.optim.AdamW(ps, lr=0.01, eps=1e-4)",
    "torch.optim.AdamW(ps, lr=0.01, eps=1e-4)", "torch.optim.AdamW(ps, lr=0.01, eps=1e-4)",
    "torch.optim.AdamW(ps, lr=0.01, eps=1e-4, amsgrad=True)",
    "torch.optim.AdamW(ps, lr=0.01, eps=1e-4, foreach=True)",
    "torch.optim.AdamW(ps, lr=0.01, eps=1e-4, fused=True)",
    "torch.optim.Adam(ps, lr=torch.tensor(0.01), eps=1e-4)",
    "torch.optim.AdamW(ps, lr=torch.tensor(0.01), eps=1e-4, fused=True)",
    "torch.optim.SGD(ps, lr=torch.tensor(0.05), momentum=0.9)",
    "torch.optim.Adam(ps, lr=0.01, eps=1e-4, weight_decay=0.1, maximize=True)",
    "torch.optim.Adamax(ps, lr=0.01, eps=1e-4)", "torch.optim.NAdam(ps, lr=0.01, eps=1e-4)",
    "torch.optim.NAdam(ps, lr=0.01, eps=1e-4, decoupled_weight_decay=True)",
    "torch.optim.NAdam(ps, lr=0.01, eps=1e-4, weight_decay=0.1, foreach=True)",
    "torch.optim.RAdam(ps, lr=0.01, eps=1e-4, weight_decay=0.1, decoupled_weight_decay=True)",
    "torch.optim.RAdam(ps, lr=0.01, eps=1e-4)", "torch.optim.Adagrad(ps, lr=0.02, eps=1e-3)",
    "torch.optim.Adadelta(ps, lr=0.5)",
    "torch.optim.RMSprop(ps, lr=0.01, eps=1e-3, momentum=0.5, centered=True)",
    "torch.optim.RMSprop(ps, lr=0.01, eps=1e-3)", "torch.optim.Rprop(ps, lr=0.01)",
    "torch.optim.ASGD(ps, lr=0.02)",
    "torch.optim.ASGD(ps, lr=0.02, lambd=0.01, t0=2, foreach=True)",
    # Adafactor's own eps is that of the weight's dtype, so another one with wider masters
    "torch.optim.Adafactor(ps, lr=0.02, eps=(2**-23, 1e-3))",
    "torch.optim.Muon([p for p in ps if p.dim() == 2], lr=0.01)",
    "torch.optim.LBFGS(ps, lr=0.1, max_iter=3)", "SignMomentum(ps)", "Counting(ps)",
    "Normalized(ps)", "Coupled(ps)",
)  # fmt: skip

GROUPS = {
    "of_all": 10, "of_trained": 4, "of_named": 2, "of_groups": 4, "of_two": 3, "of_half": 2,
    "of_decay": 2,
}  # fmt: skip
"""Names of optimizers.py, and how often each is drawn."""

SCHEDULES = (
    "torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)",
    "torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))",
    "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)",
)

PRECISIONS = (
    '"bf16"', '"bf16"', "torch.bfloat16", '"fp32"', "onefold.Precision(compute=torch.bfloat16)",
    "onefold.Precision(compute=torch.bfloat16, reduce=torch.bfloat16)",
    "onefold.Precision(compute=torch.bfloat16, buffers=torch.bfloat16)",
    "onefold.Precision(master=torch.float64)", "onefold.Precision(reduce=torch.float64)",
    'onefold.Precision(frozen="int8")',
)  # fmt: skip

OFFLOADS = (
    ('"optimizer"', 1), ('onefold.Offload(optimizer="cpu", fraction=0.5)', 1),
    ('onefold.Offload(optimizer="cpu", step_in_backward=True)', 1),
    ('onefold.Offload(optimizer="cpu", step="device")', 1),
    ('onefold.Offload(optimizer="disk", disk="FOLDER")', 1),
    ('onefold.Offload(activations="cpu")', 1),
    ('"cpu"', 3), ('"disk:FOLDER"', 3), ("onefold.Offload(tile=64)", 3),
    ('onefold.Offload(optimizer="cpu", parameters="disk", disk="FOLDER", activations="cpu")', 3),
    ('onefold.Offload(parameters="cpu")', 3),
    ('onefold.Offload(optimizer="cpu", parameters="cpu", fraction=0.25)', 3),
)  # fmt: skip
"""Choices, each with the lowest stage that has it."""

WIRES = (
    ('onefold.Wire(gradients="int8")', False, (1, 2, 3)),
    ('onefold.Wire(gradients="int4+h", feedback=True)', False, (1, 2, 3)),
    ('onefold.Wire(gradients="int8", feedback=True)', False, (1, 2, 3)),
    ('onefold.Wire(weights="int8")', False, (1, 2, 3)),
    ('onefold.Wire(weights="int8-diff", gradients="int8+h")', False, (1, 2)),
    ('"zero++"', False, (1, 2, 3)), ('"recommended"', False, (1, 2, 3)),
    ('"exact"', False, (1, 2, 3)), ('"hybrid"', True, (2, 3)), ('"replicas"', True, (1, 2, 3)),
    ('"zero++"', True, (1, 2, 3)), ('"zero++diff"', True, (2, 3)), ('"recommended"', True, (2, 3)),
    ('onefold.Wire(secondary="weights")', True, (3,)),
    ("onefold.Wire(secondary=False)", True, (3,)),
    ('onefold.Wire(gradients=("int8", "int4"), feedback=True)', True, (1, 2, 3)),
)  # fmt: skip
"""Choices, whether they are for two axes, and the stages that have them."""

LOSSY_WIRES = {w for w, *_ in WIRES} - {
    '"exact"', '"hybrid"', '"replicas"', 'onefold.Wire(secondary="weights")',
    "onefold.Wire(secondary=False)",
}  # fmt: skip

UNITS = ("[]", "lambda module: True", "lambda module: isinstance(module, nn.Linear)")


@dataclass(frozen=True)
class DrawnOperation:
    """A function of operations.py or edits.py, values of its arguments, and how often it comes."""

    name: str
    weight: float = 1.0
    choices: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    def draw(self, r: random.Random) -> str:
        """Arguments as a call has them; about half of them stay at their default."""
        if "*" in self.choices:
            return f", {r.choice(self.choices['*'])}"
        parts = [
            f"{name}={r.choice(several)!r}"
            for name, several in self.choices.items()
            if r.random() < 0.6
        ]
        return "".join(f", {part}" for part in parts).replace("=inf", "=float('inf')")


ZERO = (True, False, None)
NUMBERS = (0, 1, 2, 3, 5)
_O = DrawnOperation
OPERATIONS = (
    _O("train", 14, {"micros": (1, 2, 3), "deferred": (True, False), "clip": (None, 0.3),
                     "norm_type": (2.0, 1.0, float("inf")), "zero": ZERO}),
    _O("train_clipped", 1, {"norm_type": (2.0, 1.0, float("inf"))}),
    _O("train_by_layers", 2, {"micros": (1, 2, 3), "order": ("layers", "keep", "plain", "auto"),
                               "zero": ZERO}),
    _O("train_by_closure"), _O("train_twice"), _O("train_jointly"), _O("train_retained"),
    _O("train_with_penalty", 1, {"power": (1, 2), "zero": ZERO}),
    _O("train_on_input_gradient", 0.5, {"zero": ZERO}),
    _O("train_on_weight_gradient", 0.5, {"zero": ZERO}),
    _O("train_under_autocast", 0.3), _O("train_on_sum"),
    _O("abort_step", 1, {"where": ("pre", "post", "closure")}),
    _O("train_on_scaled_gradients", 1.5, {"how": ("mul_", "assign", "zeros", "none", "sign_",
                                                        "data.sign_", "set data")}),
    _O("train_on_assigned_gradients"), _O("skip_step", 1, {"zero": ZERO}), _O("step_alone", 0.7),
    _O("train_submodule", 1, {"number": NUMBERS}),
    _O("train_with_gradient_hooks", 1, {"kind": ("post accumulate",) * 5 + ("tensor",)}),
    _O("train_with_stepping_hooks", 1, {"by": ("parameter", "block")}),
    _O("evaluate", 2, {"mode": ("no_grad", "inference_mode", "eval")}), _O("generate"),
    _O("evaluate_unsharded"), _O("evaluate_average"), _O("take_gradients"), _O("fail_in_forward"),
    _O("fail_in_backward"), _O("read_gradients", 0.5),
    _O("read_weights", 1, {"how": ("full_tensor", "unsharded", "full_state_dict", "state_dict")}),
    _O("read_states"), _O("read_numbers"), _O("read_shapes", 0.5), _O("reload_states"),
    _O("load_whole_states"), _O("save_and_go_on", 1, {"wait": (True, False)}),
    _O("save_and_return"), _O("save_pretrained_and_load"), _O("report", 0.5), _O("record", 0.5),
    _O("edit_all", 4, {"how": ("mul_", "clamp_", "add_", "copy_", "lerp_", "iadd", "data",
                               "data.copy_", "sub_", "zero_")}),
    _O("edit_one", 3, {"how": ("constant_", "normal_", "first row", "last column", "masked_fill_"),
                       "number": NUMBERS}),
    _O("edit_unsharded", 1.5, {"writeback": (True, False)}), _O("copy_from_another"),
    _O("interpolate"), _O("freeze", 2, {"number": NUMBERS, "frozen": (True, False)}),
    _O("change_rate"), _O("change_decay"), _O("hook_steps", 1, {"kind": ("pre", "post")}),
    _O("hook_modules", 1, {"kind": ("forward", "pre", "backward")}),
    _O("reshare", 1, {"*": ("1, 2, 1, 1", "3, 1, 1, 2", "1, 1, 1, 1", "1, 0, 2, 1")}),
    _O("change_optimizer", 0.7), _O("clear_states", 0.5),
)  # fmt: skip

STREAMS = (
    "{}", "dict(offload=None)", 'dict(offload="disk:FOLDER")', "dict(budget=1 << 20)",
    "dict(budget=3000, offload=None)",
)  # fmt: skip
"""Arguments of `onefold.stream`."""

STREAMED = (
    "evaluate(p)", "evaluate(p, mode='inference_mode')", "generate(p)", "report(p)",
    "read_numbers(p)", "read_weights(p, how='full_state_dict')",
)  # fmt: skip
SPLIT = (
    "Residual(6)", "Residual(4)", "Residual(32, bias=False)", "Recomputed(Residual(4))",
    "Chain(Residual(10), nn.Tanh())",
)  # fmt: skip
"""Blocks that ranks of a tensor parallel group can split."""
TENSOR_PARALLEL = (
    "train(p)", "train(p, micros=2)", "train(p, zero=None)", "train_clipped(p)", "train_jointly(p)",
    "train_on_scaled_gradients(p)", "evaluate(p)", "edit_all(p)",
    "edit_all(p, how='clamp_')", "change_rate(p)", "read_shapes(p)", "reload_states(p)",
    "save_and_return(p)", "evaluate_unsharded(p)", "skip_step(p)", "freeze(p)",
)  # fmt: skip
