"""Predict a run before it starts: memory to the byte, bytes sent, seconds."""
