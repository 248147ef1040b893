"""Meters of energy: find the sensors of the machine, and measure blocks and repeated work with them."""

from microtome.devices.meters.base import Log, Meter, MeterReading, Missing
from microtome.devices.meters.csv_file import CsvMeter
from microtome.devices.meters.discovery import check, find, pick, register_meter, unregister_meter
from microtome.devices.meters.repetition import RepeatedWork, metered
from microtome.devices.meters.window import Energy, Window

__all__ = [
    "CsvMeter",
    "Energy",
    "Log",
    "Meter",
    "MeterReading",
    "Missing",
    "RepeatedWork",
    "Window",
    "check",
    "find",
    "metered",
    "pick",
    "register_meter",
    "unregister_meter",
]
