"""Drop-in faces of the tools that microtome succeeds: same names and meaning, right answers."""
