"""Runs that are there: read, compared, made many at a time, and told to trackers."""
