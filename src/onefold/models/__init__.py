"""Models that the command knows by name, and how others are loaded."""
