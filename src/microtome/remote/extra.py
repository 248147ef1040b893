"""The packages of the extra `remote`: without them results of servers and clients can be read, and nothing else."""

from __future__ import annotations

from microtome.errors import NotInstalled

try:
    import grpc
    from google.protobuf import descriptor_pool, message_factory
    from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
    from google.protobuf.message import DecodeError
    from grpc_health.v1 import health, health_pb2, health_pb2_grpc
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
except ImportError as error:
    raise NotInstalled(
        f"{error.name} is not installed, which servers and clients need: pip install 'microtome[remote]'"
    ) from error

__all__ = [
    "CollectorRegistry",
    "Counter",
    "DecodeError",
    "FieldDescriptorProto",
    "FileDescriptorProto",
    "Gauge",
    "Histogram",
    "descriptor_pool",
    "grpc",
    "health",
    "health_pb2",
    "health_pb2_grpc",
    "message_factory",
    "start_http_server",
]
