"""Every cut of a model: the values that cross it, or the reason to refuse it."""
