"""Run the head of a model here and its tail on a server."""

import logging
from importlib import import_module

from microtome.errors import NotInstalled

for _package in ("grpc", "google.protobuf", "grpc_health.v1", "prometheus_client"):
    try:
        import_module(_package)
    except ImportError as error:
        raise NotInstalled(
            f"{error.name} is not installed, which servers and clients need: pip install 'microtome[remote]'"
        ) from error

# Silent unless the application configures this logger; `microtome.remote.logs` has a formatter for it.
logging.getLogger("microtome.remote").addHandler(logging.NullHandler())
