from importlib.util import find_spec

collect_ignore = [] if find_spec("griffe") else ["fences.py"]  # it comes with the `docs` extra
