"""One training job under several engines: what benchmarks/peers.py and benchmarks/gpu.py share."""
