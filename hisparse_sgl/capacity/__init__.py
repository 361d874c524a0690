"""What a model's cache takes on the device and on the host, and what limits it. Needs no GPU and no torch."""
