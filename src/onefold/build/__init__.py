"""From a choice to objects: tiers, routes, checks of arguments."""
