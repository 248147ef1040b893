"""Run the head of a model here and its tail on a server."""

import logging
import os
from importlib import import_module

from microtome.errors import NotInstalled

# gRPC reads the variable when it is imported, and otherwise logs every failed handshake to stderr, where clients may
# write anything. Its errors are raised as `RemoteError`.
_has_verbosity = "GRPC_VERBOSITY" in os.environ
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
for _package in ("grpc", "google.protobuf", "grpc_health.v1", "prometheus_client"):
    try:
        import_module(_package)
    except ImportError as error:
        raise NotInstalled(
            f"{error.name} is not installed, which servers and clients need: pip install 'microtome[remote]'"
        ) from error
if not _has_verbosity:
    del os.environ["GRPC_VERBOSITY"]

# Silent unless the application configures this logger; `microtome.remote.logs` has a formatter for it.
logging.getLogger("microtome.remote").addHandler(logging.NullHandler())
