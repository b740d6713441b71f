"""The malleus command."""
