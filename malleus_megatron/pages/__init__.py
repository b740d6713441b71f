"""What people look at: a job's history as numbers, and these numbers as an HTML page."""
