"""Onefold as a strategy of Lightning: `Trainer(strategy=Strategy(stage=3))`, and for `Fabric`.

Needs the `lightning` extra. Lightning's own classes are used as they are: nothing is patched.
"""

from onefold.adapters.lightning.checkpoint_io import as_file
from onefold.adapters.lightning.strategy import Strategy

__all__ = ["Strategy", "as_file"]
