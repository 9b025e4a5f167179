"""The state of one unit: its buffers, its parameters' two forms, gathers and reductions."""
