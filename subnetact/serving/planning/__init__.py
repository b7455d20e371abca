"""How many workers a service needs (`planner`), and which requests share workers (`herd`)."""
