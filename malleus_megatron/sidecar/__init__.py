"""The planner's process beside the job, and the job's client for it. No torch."""
