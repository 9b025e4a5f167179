"""The catalogue of modules: those for which law 1 holds, by name of the law.

Laws (tests/laws/test_any_module.py) train each of them sharded and in one process. Drawn programs
take those of ordinary rows and losses, too (programs/catalogue.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import onefold
from tests.support.programs import blocks
from tests.support.programs.blocks import in_turn, unpack
from tests.support.zoo import ROWS, adamw, adamw_of_trainable, rows, sgd, tokens

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class ModuleLaw:
    """A module that trains sharded as it does in one process.

    Args:
        text: an expression of the module, of names in programs/blocks.py. OF stands for a value.
        of: values, each of which is a case; or the texts of them, by name.
        loss: of the module and a batch; None: outputs should be ones.
        batches: global batches; None: two of rows.
        optimizer: returns the optimizer of a module.
        options: of `onefold.shard`.
        worlds: numbers of ranks.
        choices: those of `law_1`.
        is_drawn: False where every call changes the module: a plain program calls it for each rank.
    """

    text: str
    of: Sequence[Any] | Mapping[str, str] = ()
    loss: Loss | None = None
    batches: Sequence[Any] | None = None
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    options: Mapping[str, Any] = field(default_factory=dict)
    worlds: Sequence[int] = (3, 1, 2, 4)
    choices: Mapping[str, Any] = field(default_factory=dict)
    is_drawn: bool = True

    @property
    def texts(self) -> dict[str, str]:
        """Return the expressions, by what follows the name of the law in that of the case."""
        of = self.of if isinstance(self.of, Mapping) else {str(v): repr(v) for v in self.of}
        return {f"-{key}": self.text.replace("OF", text) for key, text in of.items()} or {
            "": self.text
        }

    @property
    def drawn_texts(self) -> list[str]:
        """Return expressions of modules that drawn programs take: they map rows to rows."""
        is_ordinary = self.loss is None and self.batches is None and not self.options
        is_drawn = self.is_drawn and is_ordinary and not self.choices
        return [*self.texts.values()] if is_drawn else []


def module_of(text: str) -> nn.Module:
    """Build the module of an expression."""
    return eval(text, dict(vars(blocks)))


def by_half() -> list[tuple[Tensor, Tensor]]:
    """Rows with a mark that is 1 on the first ranks and 0 on the last ones (on 1 rank: 1)."""
    marks = torch.arange(ROWS) < ROWS // 2
    return [(batch, marks) for batch in rows()]


def marked(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (module(*batch) - 1).square().mean()


def of_signs() -> list[Tensor]:
    """Rows with negative sums on the first ranks, and positive ones on the last."""
    signs = torch.where(torch.arange(ROWS) < ROWS // 2, -1, 1)[:, None]
    return [batch.abs() * signs for batch in rows()]


BY_HALF = {"fine_units": False, "by_part": True}
L = ModuleLaw


def decaying(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.5)


def of_dimensions(module: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in module.parameters() if p.dim() > 1]
    others = [p for p in module.parameters() if p.dim() <= 1]
    several = [
        {"params": decayed, "weight_decay": 0.5},
        {"params": others, "weight_decay": 0.0, "lr": 0.05},
    ]
    return torch.optim.AdamW(several, lr=1e-2, eps=1e-4)


def of_blocks(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.blocks.parameters(), lr=0.1, momentum=0.9)


# losses


def gradient_penalty(module: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    out = module(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.square().mean() + (slope.norm(dim=1) - 1).square().mean()


def of_last_layer(module: nn.Module, x: Tensor) -> Tensor:
    """The last layer alone is in the graph: the others were run without gradients."""
    with torch.no_grad():
        hidden = in_turn(module.blocks, module.first(x))
    return module.last(hidden).square().mean()


def penalty_after_forward(module: nn.Module, x: Tensor) -> Tensor:
    out = module(x).square().mean()
    norms = torch.stack([p.norm() for p in module.blocks.parameters()])
    return out + 0.01 * norms.sum() + module.last.weight[0].abs().sum()


def under_autocast(module: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return module(x).float().square().mean()


def functional(module: nn.Module, x: Tensor) -> Tensor:
    parameters = dict(module.named_parameters())
    return torch.func.functional_call(module, parameters, (x,)).square().mean()


def of_kept(module: nn.Module, x: Tensor) -> Tensor:
    """A model that keeps its loss as an attribute and returns nothing."""
    assert module(x) is None
    return module.kept.pop().square().mean()


MODULES = {
    # tied parameters
    "a_head_tied_to_the_embedding_trains": L("tied_words()", batches=tokens()),
    "a_weight_tied_between_two_blocks_trains": L(
        'with_parts(Tower(3), {f"blocks.2.up.{n}": f"blocks.0.up.{n}" for n in ("weight", "bias")})'
    ),
    "a_weight_tied_between_a_block_and_the_rest_trains": L(
        'with_parts(Tower(), {"square": nn.Linear(8, 7), "square.weight": "blocks.1.up.weight"})',
        loss=lambda m, x: m(x).square().mean() + m.square(x).square().mean(),
    ),
    "a_three_way_tie_trains": L(
        "with_parts(By(a=nn.Linear(8, 8), f=nn.Tanh(), b=nn.Linear(8, 8), g=nn.Tanh(), "
        'c=nn.Linear(8, 8)), {"b.weight": "a.weight", "c.weight": "a.weight"})'
    ),
    "a_tied_module_under_two_names_trains": L(
        "with_parts(By(one=nn.ModuleList([Residual(), Residual()]), two=nn.ModuleList("
        '[Residual(), Residual()])), {"two.1": "one.0"})'
    ),
    # frozen parameters
    "a_frozen_module_keeps_its_values_and_has_no_gradient": L(
        'without_grad(Tower(), "first", "blocks.0")'
    ),
    "a_frozen_part_of_a_unit_keeps_its_values": L(
        'without_grad(Tower(), "last.weight", *(f"blocks.{i}.{name}" for i in (0, 1) '
        'for name in ("up.weight", "down.bias")))'
    ),
    "low_rank_adapters_beside_a_frozen_base_train-adamw": L(
        'without_grad(Tower([Frozen() for _ in range(3)], 8), "last")'
    ),
    "low_rank_adapters_beside_a_frozen_base_train-adamw_of_trainable": L(
        'without_grad(Tower([Frozen() for _ in range(3)], 8), "last")',
        optimizer=adamw_of_trainable,
    ),
    # the adapters act on the block's output, so their gradients are complete first
    "a_frozen_base_is_whole_after_all_adapter_gradients_are_complete": L(
        "By(first=nn.Linear(8, 8), blocks=nn.ModuleList(Gained(nn.Sequential(nn.Linear(8, 8), "
        "nn.Tanh(), nn.Linear(8, 8)).requires_grad_(False), torch.ones(8)) for _ in range(2)))"
    ),
    # unused parameters
    "parameters_unused_on_every_rank_have_no_gradient_and_do_not_decay": L(
        'with_parts(Tower(), {"blocks.0.spare": nn.Linear(8, 8), "spare": nn.Parameter('
        'torch.ones(5, 3)), "island": nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))})',
        optimizer=decaying,
    ),
    # both ways within one unit
    "parameters_used_on_some_ranks_only_have_the_mean_gradient": L(
        'with_parts(Gated(), {"two": Gained(nn.Linear(8, 8), 1.0), "never": nn.Linear(8, 8)})',
        batches=of_signs(), options={"units": []}, choices=BY_HALF,
    ),
    # one rank completes a unit that another never does; their collectives must still agree
    "several_units_used_in_part_by_some_ranks_have_the_mean_gradient": L(
        "Tower([halved() for _ in range(3)], by=halving)",
        loss=marked, batches=by_half(), choices=BY_HALF,
    ),
    # the layers around blocks share a unit; gathering it must not depend on them
    "root_layers_that_some_ranks_skip_are_trained_or_are_an_error": L(
        'with_parts(Tower(by=skipping), {"middle": nn.Linear(8, 8)})',
        loss=marked, batches=by_half(), choices={**BY_HALF, "stages": (0, 1)},
    ),
    "root_layers_that_some_ranks_skip_are_trained_or_are_an_error-stage 3": L(
        'with_parts(Tower(by=skipping), {"middle": nn.Linear(8, 8)})',
        loss=marked, batches=by_half(),
        choices={**BY_HALF, "stages": (3,), "may_fail": (onefold.OnefoldError, "")},
    ),
    "an_output_that_the_loss_does_not_use_gives_no_gradient": L(
        "By(lambda self, x: (self.one(x), self.two(x)), one=Residual(), two=Residual())",
        loss=lambda m, x: m(x)[0].square().mean(),
    ),
    # odd shapes
    "scalar_parameters_train": L(
        "Gained(Chain(*(Gained(nn.Linear(8, 8), 0.5, -0.25) for _ in range(2))))"
    ),
    "a_module_of_one_scalar_trains": L("Gained(nn.Identity())"),
    "empty_parameters_are_carried_along": L(
        "By(blocks=Chain(*(nn.Sequential(nn.Linear(8, 8), Odd((0,), (0, 4), (5, 0))) "
        "for _ in range(2))), hollow=Odd((0,)))"
    ),
    "parameters_with_fewer_rows_than_ranks_train": L(
        "By(blocks=Chain(*(Odd((1, 8), (2, 8), (1,), (5, 1, 1, 8)) for _ in range(2))), "
        "out=nn.Linear(8, 1))"
    ),
    "convolutions_and_batch_norm_train": L(
        "nn.Sequential(nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 5, 3, padding=1), nn.BatchNorm1d(5), "
        "nn.ReLU(), nn.ConvTranspose1d(5, 2, 3, padding=1), nn.GroupNorm(1, 2), nn.Flatten())",
        optimizer=sgd, choices={"by_part": True},
    ),
    "a_noncontiguous_parameter_trains": L("Named()"),
    # bf16 gradients are rounded per part: fp32 accuracy is not to be had against one process
    "parameters_of_several_dtypes_train": L(
        'By(mixed=Mixed("bfloat16"), scale=Gained(nn.Identity(), torch.ones(8, dtype='
        'torch.float64)), last=nn.Linear(8, 8).double())',
        batches=rows()[:1], optimizer=sgd, options={"precision": None},
        choices={"relative": 1e-3, "fine_units": False},
    ),
    "complex_parameters_train": L("Filtered()", optimizer=sgd),
    # modules called twice, by weight, or not at all
    "a_module_called_twice_in_one_forward_trains": L("ordered(0, 1, 0, 1)"),
    "a_recursive_call_of_the_root_trains": L("Tower(by=recursive)"),
    "an_embedding_weight_used_by_the_parent_trains": L("tied_words(False)", batches=tokens()),
    "a_module_after_a_head_by_weight_trains": L("tied_words(False, norm=True)", batches=tokens()),
    "a_blocks_weight_used_by_the_parent_trains": L("Tower(by=uses_weights)"),
    "a_blocks_weight_used_by_the_parent_before_the_block_trains": L(
        "Tower(3, by=uses_weights_before)"
    ),
    "a_weight_used_by_a_sibling_trains": L("lent()"),
    "a_weight_used_between_two_modules_of_its_unit_trains": L("lent(last=nn.Linear(8, 8))"),
    "a_module_whose_weights_are_used_without_calling_it_trains": L(
        "By(uncalled, pairs=nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) "
        "for _ in range(2)))"
    ),
    "multihead_attention_trains_though_its_projection_is_never_called": L(
        'Chain(*(nn.Sequential(Attends(), Attends("cross")) for _ in range(2)))', optimizer=sgd
    ),
    "recurrent_layers_train": L("Recurrent(OF, 2, True)", of=("LSTM", "GRU", "RNN")),
    "a_whole_transformer_trains": L('Attends("whole")', optimizer=sgd),
    "parametrized_weights_train": L(
        "By(blocks=Chain(Parametrized(), Residual()), last=Parametrized())"
    ),
    "a_method_that_is_not_forward_may_call_submodules": L(
        "Tower()", batches=rows(3), loss=lambda m, x: F.linear(
            in_turn(m.blocks, m.first(x)), m.last.weight).square().mean(),
    ),
    # outputs
    "modules_may_give_anything_that_holds_tensors": L(
        "Unpacked(OF, 2, packs=True)", worlds=(3, 1),
        loss=lambda m, x: unpack(m.kind, m(x)).square().mean(),
        of=("tuple", "list", "dict", "nested", "dataclass", "object", "object with slots",
            "namespace", "user dict"),
    ),
    "outputs_stored_on_the_module_are_trained_through": L("Tower(by=keeping)", loss=of_kept),
    "outputs_may_be_changed_in_place_and_viewed": L("Tower(by=viewed)"),
    # what must not happen is a wrong gradient
    "outputs_that_are_hidden_are_an_error_or_are_trained_through": L(
        "By(lambda self, x: next(self.blocks[1](next(self.blocks[0](x)))), blocks=nn.ModuleList("
        "By(lambda self, x: (y for y in [self.inner(x)]), inner=Residual()) for _ in range(2)))",
        choices={"may_fail": (onefold.StateError, "blocks.")},
    ),
    "a_weight_or_a_slice_of_it_may_be_the_output": L(
        "By(first=nn.Linear(8, 8), inner=Positioned(OF, 2), last=nn.Linear(8, 8))",
        of={"whole": "0", "slice": "1"},
    ),
    "the_input_or_a_view_of_it_may_be_the_output": L("Passed(2)"),
    # weights that change themselves, recompute
    "a_module_may_change_its_own_weight_in_forward": L(
        "Chain(Clamped(), Clamped())", is_drawn=False
    ),
    "a_module_may_change_its_own_weight_through_data_in_forward": L(
        'Chain(Clamped("clamp"), Clamped("clamp"))', is_drawn=False
    ),
    "a_frozen_codebook_may_follow_its_own_rule": L(
        "Chain(*(By(codebook, inner=nn.Linear(8, 8), codes=nn.Parameter(torch.randn(5, 8), "
        "requires_grad=False)) for _ in range(2)))", is_drawn=False
    ),
    "recompute_of_each_block_trains": L(
        'Tower(3, by=partial(recomputed, how="each", reentrant=OF))', of=(False, True)
    ),
    "recompute_of_several_blocks_at_once_trains": L(
        'Tower(4, by=partial(recomputed, how="several", reentrant=OF))', of=(False, True)
    ),
    # recompute runs the operations that it counted, and gathers more than forward did
    "selective_recompute_of_several_units_at_once_trains": L(
        'Tower(3, by=partial(recomputed, how="selective"))', worlds=(3, 1)
    ),
    "recompute_inside_a_block_trains": L(
        "Tower([nn.Sequential(Recomputed(nn.Linear(8, 7), OF), Recomputed(nn.Sequential(nn.Tanh(), "
        "nn.Linear(7, 8)), OF)) for _ in range(2)])", of=(False, True),
    ),
    "recompute_within_recompute_trains": L('Tower(by=partial(recomputed, how="nested"))'),
    "recompute_that_is_given_a_weight_trains_or_is_an_error": L(
        'Tower(by=partial(recomputed, how="given", reentrant=OF))', of=(False, True),
        choices={"may_fail": (onefold.StateError, "'blocks.0.down.weight'")},
    ),
    # several forwards, losses and backwards
    "two_forwards_before_one_backward_train": L(
        "Tower()", loss=lambda m, x: m(x).square().mean() + (m(x * 2) - 1).square().mean()
    ),
    "a_module_fed_with_its_own_output_trains": L(
        "nn.Sequential(Residual(), Residual())", loss=lambda m, x: m(m(m(x))).square().mean()
    ),
    "a_gradient_penalty_through_a_second_derivative_trains": L("Tower()", loss=gradient_penalty),
    "backward_of_part_of_the_parameters_leaves_the_others_alone": L("Tower()", loss=of_last_layer),
    "no_grad_inside_forward_is_respected": L("Tower(by=partly_detached)"),
    "a_penalty_on_all_parameters_is_part_of_the_gradient": L(
        "Tower()", loss=lambda m, x: m(x).square().mean() + 0.01 * sum(
            p.pow(2).sum() for p in m.parameters()),
    ),
    "a_penalty_after_the_forward_is_part_of_the_gradient": L(
        "Tower()", loss=penalty_after_forward
    ),
    "keyword_inputs_and_inputs_that_need_gradients_train": L(
        "Tower()", loss=lambda m, x: m(x=x.clone().requires_grad_()).square().mean()
    ),
    "autocast_around_forward_trains_alike_at_every_stage": L(
        "Tower()", loss=under_autocast, choices={"relative": 1e-3}
    ),
    "a_functional_call_with_the_modules_own_parameters_trains": L("Tower()", loss=functional),
    # kinds of roots
    "nested_lists_of_modules_train": L(
        "By(rows=nn.ModuleList(nn.ModuleList([Residual(), Residual()]) for _ in range(2)))"
    ),
    "lists_and_dicts_of_parameters_train": L(
        'By(list=Odd((8,), (1,)), table=with_parts(Named(), {"byname.unused": '
        "nn.Parameter(torch.ones(2))}))"
    ),
    "a_model_whose_only_parameters_are_on_the_root_trains": L(
        "Gained(nn.Tanh(), torch.randn(8), torch.zeros(8))"
    ),
    "a_torch_module_may_be_the_root": L("OF", of={
        "one layer": "nn.Linear(8, 8)",
        "sequential": "nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.LayerNorm(8),"
                      " nn.Linear(8, 8))",
    }),
    # every expert runs on every rank; a rank may have no rows for it
    "experts_that_no_row_reaches_have_the_gradient_of_one_process": L(
        "nn.Sequential(Experts(4), Experts(4))"
    ),
    # a mixture is one unit, so what each rank calls inside it is its own affair
    "experts_that_some_ranks_skip_train_as_in_one_process": L(
        "Tower([Experts(4, skips=True) for _ in range(OF)])", of=(1, 2, 5),
        choices={"fine_units": False},
    ),
    "parameter_groups_with_their_own_rates_and_frozen_ones_train-groups": L(
        "Tower()", optimizer=of_dimensions
    ),
    "parameter_groups_with_their_own_rates_and_frozen_ones_train-part": L(
        "Tower()", optimizer=of_blocks
    ),
    "computed_weights_work_in_one_unit": L(
        "By(first=nn.Linear(8, 8), block=Functional(nn.Linear(8, 8), nn.Parameter("
        "torch.tensor(0.5))), last=nn.Linear(8, 8))", options={"units": []},
    ),
    # functions of autograd do not ask a tensor's class: a wrong gradient must not come of it
    "a_custom_function_given_its_modules_weight_trains": L("nn.Sequential(Scaling(), Scaling())"),
    "a_custom_function_given_another_modules_weight_trains_or_is_an_error": L(
        "Tower(by=scaling_by_another)",
        choices={"stages": ((0,), (1,), (3,)), "fine_units": False,
                 "may_fail": (onefold.StateError, "'blocks.0.down.bias'")},
    ),
    "a_custom_function_given_another_modules_weight_by_full_tensor_trains": L(
        "with_parts(By(by_full_tensor, inner=nn.Linear(8, 8), scale=Gained(nn.Identity(), "
        'torch.randn(8))), {"other": OF})',
        of={"untied": "Gained(nn.Identity(), torch.randn(8))", "tied": '"scale"'}
    ),
}  # fmt: skip
