"""What `onefold check`, `bench` and `doctor` run."""
