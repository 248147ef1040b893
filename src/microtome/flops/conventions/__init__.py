"""Conventions: what MACs, FLOPs and MAdds mean to microtome and to other tools."""
