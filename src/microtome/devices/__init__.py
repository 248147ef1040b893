"""Clocks and meters: time, energy, memory and load of the machine; knows devices, not models."""
