"""One memory model of runs and plans: bounds (free bytes), lines (needs), and what fits."""
