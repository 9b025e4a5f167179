"""The state of one unit: its buffers, its parameters' two forms, gathers and reductions.

Read `unit`, `parameter`, `gather`, `gradient` and `reduction` first.

[Note: the tensors of a unit] n elements of a parameter, over N ranks or the k ranks of a node. "own
rows" are n/N elements, or n where the recipe replicates (stage 0; weights below stage 3).

    tensor       holds                     dtype      owner              tier         lives
    weight       own rows                  own        UnitWeights        parameters   with the unit
    local        own rows: view of weight  own        UnitParameter      as weight    with the unit
    master       own rows                  master     UnitWeights        optimizer    with the unit
    moments      own rows, each            master     the optimizer, or  device       from its first
                                                      UnitWeights        optimizer    step on
    own rows on  own rows, in a slot       own        OwnRows            device       fetch to the
    their way                                                                         end of gather
    unsharded    n, all parameters flat    compute    Unit               device       gather to
                                                                                      reshard
    decoded      n, of a packed weight     compute    DecodedWeight      device       as unsharded
    secondary    n/k                       compute    TwoHopGather       device       with the unit
    partial      n, one a parameter        compute    autograd's .grad   device       first use to
                                                                                      first hop
    sums         n/k                       own        TwoHop             device       micro-batches
    mean         own rows: .grad is a      own        MeanBuffer         device       reduction to
                 view                                                                 zero_grad, or
                                                                                      to its step
    residuals    rows that are sent        fp32       Feedback           device       step to step
    messages     see wire/exchange.py      compute    the transport      device       one message

What a parameter object shows is its form (forms.py); where gradients are between backward and step
is their phase (gradient_phase.py).

Tiers are those of `Offload`: "parameters" and "optimizer" name its fields. dtypes: "own" is the
parameter's, "compute" and "master" are of `Precision`. A resident unit (nothing to gather, nothing
to cast) computes with its weight: it has no unsharded buffer. The memory of an unsharded buffer
comes and goes, its tensor stays, so that views saved by autograd are valid again after a gather.
"""
