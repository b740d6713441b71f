"""Values only: plans, rates, their JSON and their hash."""
