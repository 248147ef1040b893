"""Counters, gauges and histograms of a server, for Prometheus."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from microtome.devices.meters.discovery import pick
from microtome.errors import BadQuery, SensorFailed
from microtome.remote.metrics_server import MetricsServer
from microtome.remote.optional_packages import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class Metrics:
    """Counters of one server, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "microtome_requests", "Requests that were answered, by cut.", ["cut"], registry=registry
        )
        self.errors = Counter("microtome_errors", "Requests that failed, by kind.", ["kind"], registry=registry)
        self.refused = Counter(
            "microtome_refused_streams", "Streams and calls that were closed, by reason.", ["reason"], registry=registry
        )
        self.bytes = Counter("microtome_bytes", "Bytes of requests and replies.", ["direction"], registry=registry)
        self.seconds = Histogram(
            "microtome_seconds", "Seconds by phase.", ["phase"], buckets=_SECONDS, registry=registry
        )
        self.queue = Gauge("microtome_queue", "Requests that wait or are being computed.", registry=registry)
        self.streams = Gauge("microtome_streams", "Open streams.", registry=registry)
        self.batches = Histogram(
            "microtome_batch", "Requests computed together.", buckets=(1, 2, 4, 8, 16, 32, 64), registry=registry
        )

    def count_joules(self, devices: Sequence[torch.device]) -> None:
        """Show what the first counter of energy that is there has counted since now; none, if none is.

        Args:
            devices: The accelerators that the model runs on; none for the CPU.
        """
        try:
            meter = pick(None, devices)
        except SensorFailed:
            return
        if meter.kind == "counter":
            gauge = Gauge(
                "microtome_joules", f"Joules since the server began, of {meter.what}.", registry=self.registry
            )
            gauge.set_function(lambda: _known(meter.read().joules))

    def listen(self, address: str) -> MetricsServer:
        """Answer Prometheus at an address such as `:9090`."""
        host, _, port = address.rpartition(":")
        try:
            return MetricsServer(host or "127.0.0.1", int(port), self.registry)
        except (ValueError, OverflowError) as error:
            raise BadQuery(f"metrics are shown at an address such as :9090, not {address!r}") from error
        except OSError as error:
            raise BadQuery(f"metrics cannot be shown at {address!r}: {error.strerror}") from error


def _known(joules: float | None) -> float:
    return math.nan if joules is None else joules
