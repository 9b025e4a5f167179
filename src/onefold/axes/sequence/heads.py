"""Which rank attends with which heads. Pure integers."""

from __future__ import annotations

from dataclasses import dataclass

from onefold.errors import ConfigError


@dataclass(frozen=True, slots=True)
class HeadCut:
    """Query heads cut into consecutive ranges, one a rank, whose lengths differ by one at most.

    Several query heads may share a head of keys and values (GQA). A rank gets all that its query
    heads read, so ranks that cut a group both get its head. With fewer heads than ranks some ranks
    have none.
    """

    num_heads: int
    num_kv_heads: int
    parts: int

    @classmethod
    def of(cls, num_heads: int, num_kv_heads: int, parts: int) -> HeadCut:
        """Raises `ConfigError` unless the query heads are a multiple of the others."""
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            wanted = "query heads that are a multiple of the heads of keys and values"
            raise ConfigError(
                wanted,
                f"{num_heads} and {num_kv_heads}",
                where="attention of a split sequence",
                hint="each head of keys and values is copied to the ranks whose query heads "
                "read it, so the query heads must form equal groups",
            )
        return cls(num_heads, num_kv_heads, parts)

    def queries(self, rank: int) -> range:
        """The query heads, and output heads, of a rank."""
        start, stop = (self.num_heads * each // self.parts for each in (rank, rank + 1))
        return range(start, stop)

    def keys(self, rank: int) -> range:
        """The heads of keys and values that a rank reads."""
        heads, group = self.queries(rank), self.num_heads // self.num_kv_heads
        if not heads:
            return range(0)
        return range(heads.start // group, (heads.stop - 1) // group + 1)

    def reads(self, rank: int) -> list[int]:
        """For each query head of a rank, its head among `keys(rank)`."""
        group, first = self.num_heads // self.num_kv_heads, self.keys(rank).start
        return [head // group - first for head in self.queries(rank)]

    def repeats(self, rank: int) -> int | None:
        """How many query heads of a rank read each of its heads; None if some are read more."""
        reads, keys = self.reads(rank), len(self.keys(rank))
        if not reads:
            return 1
        repeats = len(reads) // keys
        return repeats if reads == [head // repeats for head in range(keys * repeats)] else None
