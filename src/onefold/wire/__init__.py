"""How bytes travel between ranks, below any choice: the group, its collectives, the transports.

What users may ask for is `onefold.wire_config`; `onefold.build.routes` makes the one of the other.
"""
