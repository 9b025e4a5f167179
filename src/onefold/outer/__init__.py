"""Islands of ranks with slow links between them: an outer optimizer (DiLoCo)."""
