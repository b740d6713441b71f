"""Timings to straggling rates: pure."""
