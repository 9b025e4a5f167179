"""Drive the schedules of torch.distributed.pipelining: `onefold.pipeline`."""
