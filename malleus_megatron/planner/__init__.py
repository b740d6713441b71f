"""Problem and rates to a plan: pure."""
