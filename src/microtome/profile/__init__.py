"""What each call of a model costs."""

from microtome.profile.profile import profile

__all__ = ["profile"]
