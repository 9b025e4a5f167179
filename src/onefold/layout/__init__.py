"""Pure integers: what lies where in a flat buffer, who owns it, which parameters travel together.

Nothing here allocates memory or knows a process group; everything can be tested without ranks.
"""
