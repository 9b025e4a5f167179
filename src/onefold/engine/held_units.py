"""Which units a graph refers to by itself, where no call announces them to a backward."""


class HeldUnits(set[int]):
    """Units whose unsharded weights a graph or an output refers to, until a backward ends.

    No call announces such weights to a backward. So `recall` names those that were freed since: a
    backward came between, of the same graph or of another one. It names them until the second
    step, too, so that the node that made the reference says that the weights have changed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._since_step: set[int] = set()
        self._before_step: set[int] = set()

    def hold(self, unit: int) -> None:
        """A graph or an output refers to the unit's weights."""
        self.add(unit)
        self._since_step.add(unit)

    def recall(self) -> list[int]:
        """Hold again all units to which graphs may refer; return those that were not held."""
        recalled = sorted((self._since_step | self._before_step) - self)
        self.update(recalled)
        return recalled

    def step(self) -> None:
        """Weights have changed: graphs from before cannot run backward."""
        self._before_step, self._since_step = self._since_step, set()
