"""Lightning: the strategy of its Trainer and of Fabric. Public names: `onefold.lightning`."""
