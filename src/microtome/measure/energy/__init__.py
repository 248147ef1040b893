"""Joules, from whatever sensor the machine has, or the reason why there are none."""

from microtome.measure.energy.csv_meter import CsvMeter
from microtome.measure.energy.find import find
from microtome.measure.energy.source import Log, Missing, Reading, Source
from microtome.measure.energy.window import Energy, Window

__all__ = ["CsvMeter", "Energy", "Log", "Missing", "Reading", "Source", "Window", "find"]
