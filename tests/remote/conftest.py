from __future__ import annotations

import socket

import pytest


@pytest.fixture
def down() -> str:
    """An address where nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"
