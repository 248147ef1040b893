"""Results as plain data: they need neither the engine, nor grpc, nor rich."""
