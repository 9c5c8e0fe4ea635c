"""Saved runs: read, evaluated, compared and sent to trackers."""
