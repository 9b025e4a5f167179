"""What is written in C: compiled at installation where a compiler is; elsewhere torch does it."""
