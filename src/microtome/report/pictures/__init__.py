"""Activations and attention as PNG pictures."""
