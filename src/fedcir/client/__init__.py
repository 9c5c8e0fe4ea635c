"""Client side of a round: local training, evaluation, uploads and client state."""
