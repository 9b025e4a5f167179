"""State of one unit: its buffers, the faces its parameters show, and how it is made whole."""
