"""How many workers a service needs (`planner`)."""
