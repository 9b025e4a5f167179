"""Models larger than the device: streamed weights, kept units and KV caches."""
