"""One exchange of islands: what is sent, the messages under way, the means that arrive."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from onefold.layout.ledger import Ledger
from onefold.outer.anchors import Anchors
from onefold.outer.parcels import ParcelMessage
from onefold.outer.periods import WEIGHTS
from onefold.outer.places import Places
from onefold.wire.ticket import Ticket

Item = tuple[str, int]
"""A kind of value, and the number of a unit."""


class Delivery:
    """Messages between this rank and the other owners of its rows, as one all-to-all.

    Ranks that share no rows send one another nothing. All owners list their messages in the same
    order, so those of two ranks have the same place in what each sends and receives.
    """

    def __init__(
        self, places: Places, messages: Sequence[ParcelMessage], rows: Sequence[Tensor],
        label: str, source: int | None = None,
    ) -> None:  # fmt: skip
        """Begin to send each message, of its rows. `source`: the one island that sends; None: all.

        A collective of all islands.
        """
        group, self._island, self._messages = places.group, places.island, messages
        numels, nothing = [0] * group.world_size, [0] * group.world_size
        self._found: list[dict[int, tuple[int, int]]] = []  # of each message, by island: rank, byte
        for message in messages:
            found = dict[int, tuple[int, int]]()
            for island, rank in places.others(message.owners):
                if source in (None, self._island, island):
                    found[island] = rank, numels[rank]
                    numels[rank] += message.nbytes
            self._found.append(found)
        numels_sent = numels if source in (None, self._island) else nothing
        numels_out = numels if source != self._island else nothing
        sent = torch.empty(sum(numels_sent), dtype=torch.uint8)
        out = torch.empty(sum(numels_out), dtype=torch.uint8)
        self.sent_nbytes = len(sent)
        self._sent, self._out = sent.split(numels_sent), out.split(numels_out)
        if self.sent_nbytes:
            for message, values, found in zip(messages, rows, self._found, strict=True):
                packed = message.pack(values)
                for rank, start in found.values():
                    self._sent[rank][start : start + message.nbytes] = packed
        work = group.all_to_all(out, sent, numels_out, numels_sent)
        self._ticket = Ticket(group.track([work], label), label=label)

    def wait(self) -> None:
        """Wait until all messages are there."""
        self._ticket.wait()

    def read_message(self, number: int, island: int) -> Tensor:
        """Return one message as an island has sent it: uint8, a copy that is aligned."""
        found, parts = self._found[number], self._out
        if island == self._island:  # what the others have got
            island, parts = next(iter(found)), self._sent
        rank, start = found[island]
        return parts[rank][start : start + self._messages[number].nbytes].clone()


@dataclass(slots=True)
class OuterRound:
    """The values of some units that this rank sends, and the messages that are under way."""

    step: int  # in which it started
    fragment: int
    sent: dict[Item, Tensor]  # [own rows]
    _messages: list[tuple[Item, ParcelMessage]] = field(
        default_factory=list[tuple[Item, ParcelMessage]]
    )
    _delivery: Delivery | None = None

    @property
    def work(self) -> str:
        """What is exchanged, in words; the same on all islands."""
        kinds = " and ".join(dict.fromkeys(kind for kind, _ in self.sent))
        return f"{kinds} of fragment {self.fragment} at step {self.step}"

    def start(self, places: Places, ledger: Ledger) -> None:
        """Begin to send all values to their owners on other islands. A collective."""
        self._messages = [(item, m) for item in self.sent for m in messages_of(places, item)]
        messages = [message for _, message in self._messages]
        rows = [self.sent[item] for item, _ in self._messages]
        label = f"the exchange of islands at step {self.step}"
        self._delivery = Delivery(places, messages, rows, label)
        ledger.sent("islands", self._delivery.sent_nbytes, len(messages))

    def wait(self) -> None:
        """Wait for the messages of all islands."""
        assert self._delivery is not None, "it has started"
        self._delivery.wait()

    def apply(self, places: Places, anchors: Anchors, keep: float) -> None:
        """Average what has arrived, step the outer optimizer, write weights and states."""
        assert self._delivery is not None, "it has started"
        means = {item: torch.zeros_like(rows) for item, rows in self.sent.items()}
        for number, (item, message) in enumerate(self._messages):
            of_islands = [
                self._delivery.read_message(number, k) for k in range(len(places.weights))
            ]
            message.mean(of_islands, places.weights, means[item])
            residual = anchors.residual(item[1])
            if item[0] == WEIGHTS and residual is not None:
                message.keep_rounding(self.sent[item], of_islands[places.island], residual)
        anchors.step({index: mean for (kind, index), mean in means.items() if kind == WEIGHTS})
        for (kind, index), mean in means.items():
            rows = anchors.parameters[index].detach() if kind == WEIGHTS else mean
            anchors.write_averages(kind, index, rows, keep)


def messages_of(places: Places, item: Item) -> list[ParcelMessage]:
    """Return the messages of one unit; states of optimizers are never quantized."""
    return places.messages(item[1], exact=item[0] != WEIGHTS)


def follow_first(places: Places, anchors: Anchors, ledger: Ledger) -> None:
    """Take over the weights of island 0, unit by unit. A collective."""
    for index, anchor in enumerate(anchors.parameters):
        rows, messages = anchor.detach(), places.messages(index, exact=True)
        label = f"the weights of island 0 of unit {anchors.shares[index].unit.name!r}"
        delivery = Delivery(places, messages, [rows] * len(messages), label, source=0)
        delivery.wait()
        if places.island == 0:
            ledger.sent("islands start", delivery.sent_nbytes, len(messages))
            continue
        for number, message in enumerate(messages):
            message.unpack(delivery.read_message(number, 0), rows)
        anchors.write_averages(WEIGHTS, index, rows)
