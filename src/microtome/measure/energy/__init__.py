"""Joules, from whatever sensor the machine has, or the reason why there are none."""

from microtome.measure.energy.csv_meter import CsvMeter
from microtome.measure.energy.find import check, find, pick, register_meter, unregister_meter
from microtome.measure.energy.loop import Part, metered
from microtome.measure.energy.meter import Log, Meter, Missing, Reading
from microtome.measure.energy.window import Energy, Window

__all__ = [
    "CsvMeter",
    "Energy",
    "Log",
    "Meter",
    "Missing",
    "Part",
    "Reading",
    "Window",
    "check",
    "find",
    "metered",
    "pick",
    "register_meter",
    "unregister_meter",
]
