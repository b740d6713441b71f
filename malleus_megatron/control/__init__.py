"""When to re-plan and whether to switch: pure decisions."""
