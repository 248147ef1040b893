"""State objects: arguments that calls mutate and that go on to the next step, such as a KV cache."""
