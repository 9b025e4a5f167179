"""Record one training step: as a value, as files, and as a page."""
