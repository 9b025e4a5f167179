"""`onefold.lightning.Strategy`: one name for Trainer and for Fabric.

Lightning has two kinds of strategies, whose methods have the same names and other arguments. The
object is a Trainer's. It becomes a Fabric's when Fabric, and Fabric alone, sets its precision.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal

from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout

from onefold.adapters.lightning.fabric import FabricStrategy
from onefold.adapters.lightning.sharding import Sharding
from onefold.adapters.lightning.trainer import TrainerStrategy
from onefold.adapters.versions import warn_if_untested
from onefold.config import OffloadChoice, PrecisionChoice, StageChoice
from onefold.errors import ConfigError
from onefold.layout.units import UnitChoice
from onefold.wire.ranks import as_timeout
from onefold.wire_config import WireChoice


class Strategy(TrainerStrategy, FabricStrategy):  # pyright: ignore
    """Shard the module that a Trainer fits, or that Fabric sets up.

    Args:
        stage: see `onefold.shard`, as for the next five.
        precision: None, if Lightning's `precision` is another than "32-true". "bf16" computes in
            bf16 and keeps fp32 masters.
        offload: tiers of the states.
        wire: codecs of the messages. With several nodes, each of Lightning's nodes is one.
        units: a predicate over submodules, or a list of them.
        timeout: seconds that ranks wait for one another. Default: Lightning's, 30 minutes.
        start_method: how Lightning starts local processes: "popen" runs the script again, "fork"
            works in notebooks. Without meaning under torchrun.
        process_group_backend: None takes gloo on CPUs and nccl on GPUs.

    Raises:
        ConfigError: a choice that cannot work, when the strategy, or the Trainer, is built.

    Example:
        >>> trainer = lightning.pytorch.Trainer(strategy=onefold.lightning.Strategy(stage=3))
        >>> trainer.fit(module, loader)
    """

    def __init__(  # noqa: PLR0913 - the contract
        self,
        stage: StageChoice = 3,
        *,
        precision: PrecisionChoice = None,
        offload: OffloadChoice = None,
        wire: WireChoice = None,
        units: UnitChoice = None,
        timeout: float | timedelta | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        process_group_backend: str | None = None,
    ) -> None:
        warn_if_untested("lightning")
        self.sharding = Sharding(stage, precision, offload, wire, units, timeout)
        for kind in (TrainerStrategy, FabricStrategy):
            kind.__init__(
                self,
                timeout=as_timeout(timeout) or default_pg_timeout,
                start_method=start_method,
                process_group_backend=process_group_backend,
            )

    @property
    def precision(self) -> Any:
        """The precision plugin of Fabric; a Trainer's is `precision_plugin`."""
        return super().precision

    @precision.setter
    def precision(self, precision: Any) -> None:
        self._precision = precision
        if precision is None:
            return
        if type(self) is not Strategy:
            raise ConfigError(
                "onefold.lightning.Strategy itself for Fabric",
                f"its subclass {type(self).__name__}",
                hint="derive from onefold.adapters.lightning.fabric.FabricStrategy as well",
            )
        self.__class__ = FabricStrategy  # pyright: ignore
