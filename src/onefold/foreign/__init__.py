"""Checkpoints of other programs: how they are recognised and read, and written for them.

Below `api`, which hands `PEERS` to `onefold.checkpoint`: that room knows the protocol alone
(`PeerFormat`, `PieceStore` in listing.py). Whatever reads a pickle is here.
"""

from onefold.checkpoint.listing import PeerFormat
from onefold.foreign.dcp import DcpFormat
from onefold.foreign.deepspeed import DeepSpeedFormat
from onefold.foreign.programs import PROGRAMS, ArchiveFormat

PEERS: tuple[PeerFormat, ...] = (DeepSpeedFormat(), *PROGRAMS, DcpFormat(), ArchiveFormat())
"""All formats that `onefold.load`, `onefold inspect` and `onefold export` recognise, in order."""
