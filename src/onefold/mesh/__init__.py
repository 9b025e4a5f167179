"""Which ranks train together, on which device, and how they find each other."""
