"""Read DeepSpeed configurations. DeepSpeed itself is neither needed nor imported."""
