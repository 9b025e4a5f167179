"""Programs drawn from the public surface, run sharded and plain, and shrunk to small scripts."""
