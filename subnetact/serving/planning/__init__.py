"""How many workers a service needs (`planner`, `tuner`), and which requests share workers (`herd`)."""
