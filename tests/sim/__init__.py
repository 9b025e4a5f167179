"""A simulated accelerator: torch's device "sim", in processes that these tests start.

    building   compile device.cpp once for all sessions and workers
    device     load it, and tell torch of it; what it has counted and found
    ranks      run a function on ranks, each a process with a simulated device of its own

The test process itself never loads it: torch would take it for the accelerator of every test.
"""
