"""What happens when: torch events become the verbs of units, in an order, with overlap."""
