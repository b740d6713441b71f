"""Closed forms of time: one equation a function."""
