"""Outer optimizers: islands of ranks that train apart and average their steps now and then."""
