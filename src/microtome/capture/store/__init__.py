"""Stores of recorded tensors: in memory, or in a folder of safetensors shards."""

from microtome.capture.store.base import TensorStore
from microtome.capture.store.disk import DiskStore
from microtome.capture.store.memory import MemoryStore
from microtome.capture.store.merged import MergedRecording, open_recordings
from microtome.capture.store.recording import Recording, open_folder
from microtome.capture.store.series import Series
from microtome.capture.store.stats import Histogram, Stats

__all__ = [
    "DiskStore",
    "Histogram",
    "MemoryStore",
    "MergedRecording",
    "Recording",
    "Series",
    "Stats",
    "TensorStore",
    "open_folder",
    "open_recordings",
]
