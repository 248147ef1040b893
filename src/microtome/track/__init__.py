"""The module that runs now, in the forward and in the backward."""

from microtome.track.tracker import Tracker, track

__all__ = ["Tracker", "track"]
