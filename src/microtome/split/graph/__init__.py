"""Stages as graphs of operators: captured from a run, compiled, and exported."""
