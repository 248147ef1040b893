"""The two halves of a split model as two programs: a server that runs tails, and a client that runs heads."""

import logging
from importlib.util import find_spec

from microtome.errors import NotInstalled

for _package in ("grpc", "grpc_health", "google.protobuf", "prometheus_client"):
    if find_spec(_package.partition(".")[0]) is None or find_spec(_package) is None:
        raise NotInstalled(
            f"{_package} is not installed, which servers and clients need: pip install 'microtome[remote]'"
        )

# Who wants to hear what both sides say configures this logger; see `microtome.remote.logs`.
logging.getLogger("microtome.remote").addHandler(logging.NullHandler())
