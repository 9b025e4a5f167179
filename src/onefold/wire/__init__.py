"""How bytes travel between ranks, below any choice: the group, its collectives, the transports.

`onefold.wire_config` has the users' choices; `onefold.compose.routes` builds transports from them.
"""
