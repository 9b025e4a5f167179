"""When islands exchange which values: DiLoCo, Streaming DiLoCo and DES-LOC are rows of this table.

DiLoCo             Periods(30)
Streaming DiLoCo   Periods(30, fragments=3, delay=2, keep=0.5)
DES-LOC            Periods(30, exp_avg=90, exp_avg_sq=180)
"""

from dataclasses import dataclass

from onefold.errors import ConfigError

WEIGHTS, EXP_AVG, EXP_AVG_SQ = "weights", "exp_avg", "exp_avg_sq"


@dataclass(frozen=True, slots=True)
class Periods:
    """Steps between exchanges of islands, for each kind of value.

    Args:
        weights: steps between exchanges of a parameter.
        exp_avg: steps between averages of first moments, a multiple of `weights`. None: never.
        exp_avg_sq: likewise of second moments.
        fragments: units are dealt to so many fragments in turn. Their exchanges are spread evenly
            over the period.
        delay: steps between the start of an exchange and its use, in which the island trains on.
        keep: share of its own weights that an island keeps where it takes over averaged ones.

    Raises:
        ConfigError: a number that cannot work; the message names the field.

    Example:
        >>> onefold.islands(model, optimizer, every=onefold.islands.Periods(30, delay=2))

    Sources: DiLoCo, arXiv 2311.08105; Streaming DiLoCo, arXiv 2501.18512; DES-LOC, arXiv
    2505.22549.
    """

    weights: int
    exp_avg: int | None = None
    exp_avg_sq: int | None = None
    fragments: int = 1
    delay: int = 0
    keep: float = 0.0

    def __post_init__(self) -> None:
        _check_count("every", self.weights, 1)
        _check_count("Periods.fragments", self.fragments, 1)
        _check_count("Periods.delay", self.delay, 0)
        for name in (EXP_AVG, EXP_AVG_SQ):
            period = self.period_of(name)
            if period is not None and (not _is_count(period) or period % self.weights):
                wanted = f"Periods.{name} to be None or a multiple of weights={self.weights}"
                hint = f"{name}={3 * self.weights}: moments travel together with weights"
                raise ConfigError(wanted, repr(period), hint=hint)
        if self.fragments > self.weights:
            wanted = f"Periods.fragments to be at most weights={self.weights}"
            hint = "a fragment is exchanged in a step of its own"
            raise ConfigError(wanted, self.fragments, hint=hint)
        if self.delay >= self.weights // self.fragments:
            wanted = f"Periods.delay below weights // fragments = {self.weights // self.fragments}"
            hint = "one exchange is under way at a time"
            raise ConfigError(wanted, self.delay, hint=hint)
        if isinstance(self.keep, bool) or not 0 <= self.keep < 1:
            hint = "keep=0 takes over averaged weights, keep=0.5 is the middle"
            raise ConfigError(
                "Periods.keep to be at least 0 and below 1", repr(self.keep), hint=hint
            )

    def period_of(self, kind: str) -> int | None:
        """Steps between exchanges of one kind of value."""
        return {WEIGHTS: self.weights, EXP_AVG: self.exp_avg, EXP_AVG_SQ: self.exp_avg_sq}[kind]

    def units_of(self, fragment: int, num_units: int) -> range:
        """The units of a fragment: neighbours are in different ones."""
        return range(fragment, num_units, self.fragments)

    def due(self, step: int) -> tuple[int, tuple[str, ...]] | None:
        """The fragment whose exchange starts after this step, counted from 1, and the kinds."""
        for fragment in range(self.fragments):
            moved = step + fragment * self.weights // self.fragments
            if moved % self.weights == 0:
                kinds = (WEIGHTS, EXP_AVG_SQ, EXP_AVG)  # which needs to see new second moments
                periods = ((kind, self.period_of(kind)) for kind in kinds)
                return fragment, tuple(k for k, every in periods if every and moved % every == 0)
        return None


def _is_count(value: object, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _check_count(name: str, value: object, least: int) -> None:
    if not _is_count(value, least):
        hint = "every=30: islands exchange after every 30th step"
        raise ConfigError(f"{name} to be a whole number from {least}", repr(value), hint=hint)
