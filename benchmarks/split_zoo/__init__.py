"""Cuts of many models, each compared with the whole model: `python -m benchmarks.split_zoo [--save] [FAMILY …]`."""
