"""What `onefold train` and `onefold check` run: the byte GPT, the corpus, the loops."""
