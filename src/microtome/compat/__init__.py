"""Drop-in faces of the tools that microtome succeeds: the same names, right answers. Their how-to pages list what differs."""
