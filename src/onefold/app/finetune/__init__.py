"""What `onefold finetune` runs: rows of a file, a model from its folder, and TRL's trainer."""
