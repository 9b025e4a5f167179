"""`onefold.measure_noise`: the gradient noise scale of each step, in the report."""

from __future__ import annotations

from torch import nn

from onefold.engine.noise import NoiseScale
from onefold.engine.registry import engine_of
from onefold.errors import ConfigError


def measure_noise(module: nn.Module) -> NoiseScale:
    """Estimate the gradient noise scale of each step from now on.

    The report says how much of the progress of an endless batch a step makes, and suggests a number
    of micro-batches. Any loop is measured: `onefold.accumulate`, `onefold.accumulate_layers`, or
    Trainer, whose logs get `gradient_noise_scale`. Each gradient is read once more before its
    reduction and once after it. A step sends five numbers more.

    Call it on every rank. Micro-batches have equal weights, as in a loss divided by their number.
    A step is left out where gradients of an earlier one were not cleared, where they are not
    finite, or where pipelines or different numbers of reductions make ranks differ. Units on a mesh
    of their own (experts) and units in row blocks are left out.

    Args:
        module: one that `shard` has sharded.

    Returns:
        The estimate, which follows the steps. `batches` is the noise scale as a multiple of the
        last step's rows, `suggested_microbatches` the number of micro-batches that it suggests;
        both None at first.

    Raises:
        ConfigError: a module that evaluates only, or one small batch a step: one rank that sums
            micro-batches before they are seen.

    Example:
        >>> noise = onefold.measure_noise(model)
        >>> for step in range(100):
        ...     train(model)
        >>> print(noise.describe(), noise.suggested_microbatches)

    Source: McCandlish et al., arXiv 1812.06162, appendix A.1.
    """
    engine = engine_of(module)
    where = f"rank {engine.group.rank}"
    if engine.is_inference:
        hint = "onefold.shard a module that trains"
        got = "one of onefold.stream"
        raise ConfigError("a module that trains", got, where=where, hint=hint)
    if engine.group.world_size == 1 and engine.policy.defers_reduction:
        hint = "stage=2 shows each micro-batch alone, and more ranks show theirs"
        got = f"one rank at stage {engine.recipe.stage.number}"
        raise ConfigError("two gradients a step, to compare", got, where=where, hint=hint)
    return engine.hands.measure_noise(engine.group, engine.context.rest_world)
