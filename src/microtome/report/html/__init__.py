"""A profile as one self-contained page: cards, a tree, a table, charts, and where to cut."""
