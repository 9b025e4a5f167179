"""The command `onefold`: arguments, output, exit codes. Commands import torch when they run."""
