"""Looking at what flows through a model, keeping it, and changing it on purpose."""
