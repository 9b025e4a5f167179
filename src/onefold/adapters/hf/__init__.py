"""Hugging Face libraries: Trainer, Accelerate, TRL, PEFT. Public names: `onefold.hf`."""
