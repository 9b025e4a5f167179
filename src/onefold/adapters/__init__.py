"""Other libraries: Hugging Face, Lightning and DeepSpeed configurations."""
