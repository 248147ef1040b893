"""Cutting a model in two, exactly."""
