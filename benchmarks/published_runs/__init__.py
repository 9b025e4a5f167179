"""Published training runs, and how far the planner's simulator is from them."""
