"""Drawn programs that blow rounding up: each was once called wrong, and is right."""

from tests.support.programs.drawing import Drawn, DrawnLeg

ROUNDED = (
    Drawn(
        seed=52054,
        blocks=("TiedHead()", "TiedHead()", "TiedHead()"),
        legs=(
            DrawnLeg(
                world_size=4,
                options=(
                    ("stage", "3"),
                    ("wire", 'onefold.Wire(gradients="int4+h", feedback=True)'),
                    ("units", "[]"),
                ),
                operations=(
                    "train(p, micros=3, deferred=True)",
                    "edit_all(p, how='data.copy_')",
                    "train(p, norm_type=2.0, zero=False)",
                    "read_shapes(p)",
                    "read_weights(p, 'unsharded')",
                ),
            ),
            DrawnLeg(
                world_size=3,
                options=(("stage", "0"),),
                operations=(
                    "train_twice(p)",
                    "record(p)",
                    "read_shapes(p)",
                    "read_weights(p, 'full_tensor')",
                ),
            ),
        ),
        optimizer="torch.optim.AdamW(ps, lr=0.01, eps=1e-4)",
        groups="of_two",
    ),
    Drawn(
        seed=52165,
        blocks=("Residual(33)", "Residual(33)"),
        legs=(
            DrawnLeg(
                world_size=1,
                options=(("stage", "2"), ("units", "lambda module: isinstance(module, nn.Linear)")),
                operations=(
                    "read_shapes(p)",
                    "edit_all(p, how='copy_')",
                    "train_twice(p)",
                    "train_jointly(p)",
                    "read_shapes(p)",
                    "read_weights(p, 'state_dict')",
                ),
            ),
            DrawnLeg(
                world_size=1,
                options=(
                    ("stage", "3"),
                    ("precision", "onefold.Precision(master=torch.float64)"),
                    ("offload", '"cpu"'),
                ),
                operations=(
                    "train_jointly(p)",
                    "change_rate(p)",
                    "train(p, deferred=False, clip=0.3, norm_type=1.0, zero=None)",
                    "train(p, micros=1, deferred=False, norm_type=2.0, zero=None)",
                    "read_states(p)",
                    "read_weights(p, 'full_state_dict')",
                ),
            ),
        ),
        optimizer="torch.optim.SGD(ps, lr=0.05, fused=True)",
        groups="of_trained",
        dtype="bfloat16",
    ),
    Drawn(
        seed=81827,
        blocks=('Normed("group")', "Filtered()", "Frozen()", 'Normed("group")', 'Normed("group")'),
        legs=(
            DrawnLeg(
                world_size=2,
                options=(("stage", "0"),),
                operations=(
                    "edit_all(p, how='data.copy_')",
                    "fail_in_forward(p)",
                    "train_by_closure(p)",
                    "read_states(p)",
                    "load_whole_states(p)",
                    "read_shapes(p)",
                    "read_weights(p, 'torch')",
                ),
            ),
            DrawnLeg(
                world_size=3,
                options=(("stage", "0"),),
                operations=(
                    "edit_one(p, number=2)",
                    "train_by_closure(p)",
                    "train_by_closure(p)",
                    "save_pretrained_and_load(p)",
                    "read_states(p)",
                    "read_weights(p, 'full_tensor')",
                ),
            ),
        ),
        optimizer="torch.optim.LBFGS(ps, lr=0.1, max_iter=3)",
    ),
    Drawn(
        seed=90764,
        blocks=('Packed("tuple")',),
        legs=(
            DrawnLeg(
                world_size=2,
                options=(("stage", "1"),),
                operations=(
                    "freeze(p, number=3, frozen=False)",
                    "train_jointly(p)",
                    "train_jointly(p)",
                    "read_shapes(p)",
                    "read_weights(p, 'full_state_dict')",
                ),
            ),
            DrawnLeg(
                world_size=3,
                options=(("stage", "1"), ("wire", 'onefold.Wire(weights="int8")')),
                operations=(
                    "train(p, micros=3, deferred=False, clip=0.3,"
                    " norm_type=float('inf'), zero=None)",
                    "train(p, clip=0.3, zero=True)",
                    "save_and_go_on(p, wait=False)",
                    "train(p, zero=True)",
                    "read_states(p)",
                    "read_weights(p, 'full_tensor')",
                ),
            ),
        ),
        optimizer="torch.optim.Rprop(ps, lr=0.01)",
        groups="of_trained",
    ),
    Drawn(
        seed=91446,
        blocks=(
            "Odd((), (0,), (0, 3), (3, 0))",
            'Attends("encoder")',
            "Detached()",
            "Buffered()",
            "Odd((), (0,), (0, 3), (3, 0))",
        ),
        legs=(
            DrawnLeg(
                world_size=2,
                options=(
                    ("stage", "1"),
                    ("precision", "torch.bfloat16"),
                    ("units", "lambda module: isinstance(module, nn.Linear)"),
                ),
                operations=(
                    "load_whole_states(p)",
                    "train(p, deferred=True, norm_type=1.0)",
                    "read_shapes(p)",
                    "read_weights(p, 'full_tensor')",
                ),
            ),
        ),
        optimizer="torch.optim.AdamW(ps, lr=0.01, eps=1e-4, fused=True)",
        groups="of_trained",
    ),
    Drawn(
        seed=95519,
        blocks=(
            "Odd((), (0,), (0, 3), (3, 0))",
            "Odd((7, 3), (13,))",
            'Normed("instance")',
            "Odd((), (0,), (0, 3), (3, 0))",
            "Odd((), (0,), (0, 3), (3, 0))",
        ),
        legs=(
            DrawnLeg(
                world_size=2,
                options=(
                    ("stage", "3"),
                    ("offload", 'onefold.Offload(optimizer="disk", disk="FOLDER")'),
                    ("units", "lambda module: isinstance(module, nn.Linear)"),
                ),
                operations=(
                    "read_states(p)",
                    "train(p, deferred=False, norm_type=float('inf'), zero=None)",
                    "train(p, norm_type=2.0, zero=None)",
                    "evaluate(p, mode='eval')",
                    "read_shapes(p)",
                    "read_weights(p, 'full_tensor')",
                ),
            ),
            DrawnLeg(
                world_size=2,
                options=(("stage", "0"), ("units", "[]")),
                operations=(
                    "train_jointly(p)",
                    "report(p)",
                    "take_gradients(p)",
                    "read_states(p)",
                    "read_weights(p, 'full_state_dict')",
                ),
            ),
            DrawnLeg(
                world_size=2,
                options=(
                    ("stage", "2"),
                    (
                        "precision",
                        "onefold.Precision(compute=torch.bfloat16, buffers=torch.bfloat16)",
                    ),
                    ("wire", '"exact"'),
                ),
                operations=(
                    "train(p, micros=3, deferred=True, clip=None, zero=False)",
                    "edit_one(p, how='last column')",
                    "read_shapes(p)",
                    "read_weights(p, 'state_dict')",
                ),
            ),
        ),
        optimizer="torch.optim.Adam(ps, lr=torch.tensor(0.01), eps=1e-4)",
        groups="of_groups",
        schedule="torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)",
    ),
    Drawn(
        seed=96669,
        blocks=("Recomputed(Convolved())", "Named()", "Odd((7, 3), (13,))"),
        legs=(
            DrawnLeg(
                world_size=3,
                options=(("stage", "2"), ("units", "[]")),
                operations=(
                    "edit_unsharded(p)",
                    "train_clipped(p)",
                    "train(p, micros=2, deferred=True, clip=0.3, norm_type=2.0, zero=None)",
                    "train_on_assigned_gradients(p)",
                    "read_states(p)",
                    "read_weights(p, 'torch')",
                ),
            ),
            DrawnLeg(
                world_size=2,
                options=(("stage", "3"),),
                operations=(
                    "step_alone(p)",
                    "edit_unsharded(p, writeback=True)",
                    "train(p, micros=3, clip=None, norm_type=1.0)",
                    "hook_steps(p)",
                    "read_states(p)",
                    "read_weights(p, 'full_tensor')",
                ),
            ),
            DrawnLeg(
                world_size=1,
                options=(("stage", "1"),),
                operations=(
                    "train(p, micros=2, deferred=True, clip=None, norm_type=2.0, zero=True)",
                    "train(p, micros=2, deferred=False, norm_type=float('inf'), zero=True)",
                    "read_numbers(p)",
                    "edit_one(p, how='masked_fill_', number=0)",
                    "fail_in_backward(p)",
                    "read_states(p)",
                    "read_weights(p, 'state_dict')",
                ),
            ),
        ),
        optimizer="Normalized(ps)",
        dtype="bfloat16",
    ),
    Drawn(
        seed=99159,
        blocks=(
            "Convolved()",
            "Unused()",
            "nn.Linear(8, 8).requires_grad_(False)",
            'Chain(Embedded("bag"), Functional(Buffered()))',
            "Convolved()",
        ),
        legs=(
            DrawnLeg(
                world_size=3,
                options=(("stage", "0"), ("precision", 'onefold.Precision(frozen="int8")')),
                operations=(
                    "train(p)",
                    "change_rate(p)",
                    "read_states(p)",
                    "read_weights(p, 'unsharded')",
                ),
            ),
        ),
        optimizer="torch.optim.SGD(ps, lr=0.05)",
        groups="of_groups",
        schedule="torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))",
    ),
    Drawn(
        seed=1101554,
        blocks=("Recomputed(Chain(Experts(), Frozen()), reentrant=True)", "InPlace()"),
        legs=(
            DrawnLeg(
                world_size=3,
                options=(
                    ("stage", "2"),
                    ("offload", 'onefold.Offload(optimizer="disk", disk="FOLDER")'),
                    ("wire", 'onefold.Wire(weights="int8")'),
                    ("units", "[]"),
                ),
                operations=(
                    "read_shapes(p)",
                    "train_by_closure(p)",
                    "train_with_penalty(p)",
                    "save_pretrained_and_load(p)",
                    "read_shapes(p)",
                    "read_weights(p, 'state_dict')",
                ),
            ),
        ),
        optimizer="torch.optim.Adagrad(ps, lr=0.02, eps=1e-3)",
        groups="of_named",
        dtype="float64",
    ),
)
