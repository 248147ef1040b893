"""A trace as a graph of calls, in DOT and SVG."""
