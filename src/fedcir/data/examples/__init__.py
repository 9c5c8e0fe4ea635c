"""What a client trains on, batch by batch: images, their features, or the Datasets of a caller."""
