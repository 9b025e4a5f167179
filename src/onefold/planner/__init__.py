"""What a run will need, before it runs: memory to the byte, bytes sent, seconds."""
