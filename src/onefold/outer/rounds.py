"""One exchange of islands: what is sent, the messages under way, the means that arrive."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from onefold.errors import WireError
from onefold.layout.ledger import Ledger
from onefold.outer.anchors import Anchors
from onefold.outer.membership import Membership
from onefold.outer.parcels import Arriving, ParcelMessage
from onefold.outer.periods import WEIGHTS

Item = tuple[str, int]
"""A kind of value, and the number of a unit."""


@dataclass(slots=True)
class OuterRound:
    """The values of some units that this rank sends, and what has come of them.

    Nothing is applied before all islands have all messages: until then the values can be sent
    again, to other islands.
    """

    step: int  # in which it started
    fragment: int
    sent: dict[Item, Tensor]  # [own rows]
    frozen: Sequence[str] = ()  # parameters that islands only average
    means: dict[Item, Tensor] = field(default_factory=dict[Item, Tensor])
    failure: str = ""  # of this rank's last attempt
    _packed: dict[Item, list[Tensor]] = field(default_factory=dict[Item, list[Tensor]])
    _arriving: dict[Item, list[Arriving]] = field(default_factory=dict[Item, list[Arriving]])

    @property
    def work(self) -> str:
        """What is exchanged, in words; the same on all islands."""
        kinds = " and ".join(dict.fromkeys(kind for kind, _ in self.sent))
        frozen = f", with {len(self.frozen)} frozen: {self.frozen[0]} ..." if self.frozen else ""
        return f"{kinds} of fragment {self.fragment}{frozen}"

    def start(self, members: Membership, ledger: Ledger) -> None:
        """Begin to send all values to the islands that take part now, unit by unit."""
        self._packed.clear()
        self._arriving.clear()
        self.means.clear()
        self.failure = ""
        try:
            members.announce(self.step, self.work)
            members.connect()
            for item, rows in self.sent.items():
                messages = messages_of(members, item)
                packed = self._packed[item] = [message.pack(rows) for message in messages]
                self._arriving[item] = [
                    members.links.gather(message.owners, packed_message)
                    for message, packed_message in zip(messages, packed, strict=True)
                ]
                nbytes = sum(map(members.links.sent_nbytes, packed))
                ledger.sent("islands", nbytes, len(packed))
        except (WireError, RuntimeError) as error:
            self.failure = str(error).splitlines()[0]

    def receive(self, members: Membership, timeout: float) -> float:
        """Wait for all messages, and average each unit's as they come; return the deadline."""
        deadline = time.monotonic() + timeout
        try:
            for item in self.sent if not self.failure else ():
                mean = self.means[item] = torch.zeros_like(self.sent[item])
                pairs = zip(messages_of(members, item), self._arriving.pop(item), strict=True)
                for message, arriving in pairs:
                    arriving.wait(deadline, members.has_failed)
                    message.mean(arriving.messages, members.weights, mean)
        except (WireError, RuntimeError) as error:
            self.failure = str(error).splitlines()[0]
        members.links.forget()
        return deadline

    def apply(self, members: Membership, anchors: Anchors, keep: float) -> None:
        """Step the outer optimizer, and write new weights and averaged states."""
        for item, packed in self._packed.items():
            residual = anchors.residual(item[1])
            if item[0] == WEIGHTS and residual is not None:
                pairs = zip(messages_of(members, item), packed, strict=True)
                for message, message_bytes in pairs:
                    message.keep_rounding(self.sent[item], message_bytes, residual)
        anchors.step({index: mean for (kind, index), mean in self.means.items() if kind == WEIGHTS})
        for (kind, index), mean in self.means.items():
            rows = anchors.parameters[index].detach() if kind == WEIGHTS else mean
            anchors.write(kind, index, rows, keep)


def messages_of(members: Membership, item: Item) -> list[ParcelMessage]:
    """The messages of one unit; states of optimizers are never quantized."""
    return members.messages(item[1], exact=item[0] != WEIGHTS)
