"""What `onefold generate` runs: a model and its tokens, the loops, and what they measured."""
