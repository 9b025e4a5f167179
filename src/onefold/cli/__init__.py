"""The command `onefold`: arguments, output, exit codes. Nothing imports torch at the top."""
