"""Drop-in faces of the tools that microtome succeeds: the same names, right answers.

The how-to page of each tool lists what differs.
"""
