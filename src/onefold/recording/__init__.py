"""Reports and recordings of runs."""
