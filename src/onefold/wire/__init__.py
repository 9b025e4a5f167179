"""How bytes travel between ranks, below any choice: the group, its collectives, the transports.

`onefold.wire_config` has the users' choices; `onefold.compose.routes` builds transports from them.
Read `ranks`, `collectives`, `transport` and `exchange` first.

[Note: the groups] What each group of ranks is for:

    group                  ranks                                  used for
    Ranks.everyone         all that train on the data axis        agreements, flags, norms; weights
                                                                  and gradients on one axis
    Ranks.inside           this node's                            the first hop of gradients, the
                                                                  last of weights; all messages of
                                                                  weights where nodes are replicas
    Ranks.between          one of each node, this local rank      the second hop of gradients, the
                                                                  first of weights; replicas' means
    Routes.group           as Ranks.everyone                      labels of ranks in errors
    Routes.transport       the ranks among which state is cut     exact rows: checkpoints, edits,
                                                                  `unsharded`, moves of rows
    Context.holders        data axis and model axes together      values and checks that all holders
                                                                  of the module share
    UnitRanks (compose)    a mesh of a unit's own: its experts    all messages of that unit
    lanes                  as Ranks.everyone, on gloo             one connection a phase of a step,
                                                                  and one for agreements
"""
