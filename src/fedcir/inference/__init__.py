"""A finished run's model in use: it predicts, is evaluated on any data, and is exported."""
