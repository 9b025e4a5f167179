"""Where bytes sleep. A `Store` gives flat buffers of one tier and takes them back."""
