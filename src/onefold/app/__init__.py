"""What the command runs: its subcommands, training, generation and measuring tools."""
