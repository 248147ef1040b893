"""Measured runs as files for Perfetto and speedscope."""
