from importlib.util import find_spec

collect_ignore = [] if find_spec("ray") else ["microtome/scale/ray"]  # it comes with the `ray` extra
