"""Count and measure each call of a model."""

from microtome.profile.profile import profile

__all__ = ["profile"]
