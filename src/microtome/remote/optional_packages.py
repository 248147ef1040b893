"""The packages of the extra `remote`: without them results of servers and clients can be read, and nothing else."""

from __future__ import annotations

from microtome.errors import NotInstalled

try:
    import grpc
    from google.protobuf import descriptor_pool, message_factory
    from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
    from google.protobuf.message import DecodeError
    from grpc_health.v1 import health_pb2
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
except ImportError as error:
    raise NotInstalled(
        f"{error.name} is not installed, which servers and clients need: pip install 'microtome[remote]'"
    ) from error

__all__ = [
    "CONTENT_TYPE_LATEST",
    "CollectorRegistry",
    "Counter",
    "DecodeError",
    "FieldDescriptorProto",
    "FileDescriptorProto",
    "Gauge",
    "Histogram",
    "descriptor_pool",
    "generate_latest",
    "grpc",
    "health_pb2",
    "message_factory",
]
