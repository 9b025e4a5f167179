"""From a user's choices to objects: the composition root."""
