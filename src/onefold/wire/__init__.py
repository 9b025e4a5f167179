"""How bytes travel between ranks: the group, its collectives, the transport composed from them."""
