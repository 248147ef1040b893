"""Device backends, and meters of energy and load; knows devices, not models."""
