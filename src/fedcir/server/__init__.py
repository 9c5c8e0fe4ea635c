"""Server side of a round: aggregation, validation of replies, privacy accounting, and attacks for experiments."""
