"""Attention weights of any model."""
