"""A federation at work: clients, server, rounds, the run folder, and how messages travel."""
