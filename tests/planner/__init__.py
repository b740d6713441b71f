"""Searches of the planner against oracles: minutes, so apart from the unit tests."""
