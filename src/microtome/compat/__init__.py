"""Drop-ins for the tools that microtome succeeds: the same names, correct results.

The how-to page of each tool lists the differences.
"""
