"""`connect`: a model that runs partly here and partly on a server."""

from __future__ import annotations

from typing import Any

from torch import nn

from microtome.addresses import INPUT
from microtome.errors import BadQuery, RemoteError
from microtome.remote.autotune import LOSSLESS, Autotuner, autotune, fastest_codec
from microtome.remote.client import Remote
from microtome.remote.connection import Connection
from microtome.remote.local_model import LocalModel, handshake
from microtome.remote.request import RequestOptions, Route
from microtome.remote.security import Security
from microtome.split.boundary.codecs import parse_codec
from microtome.split.stage import Stage
from microtome.units import parse_seconds, parse_size


def connect(
    model: nn.Module | Stage,
    inputs: Any,
    server: str,
    at: Any = "auto",
    *,
    deadline: float | str | None = None,
    codec: str = "auto",
    fallback: str | None = "local",
    tls: bool = False,
    ca: str | None = None,
    cert: str | None = None,
    key: str | None = None,
    token: str | None = None,
    server_name: str | None = None,
    any_torch: bool = False,
    max_reply: int | str | None = None,
    timeout: float = 10.0,
) -> Remote:
    """Run a model partly here and partly on a server.

    Args:
        model: The model that the server has, in eval mode; or its first stage, from `mt.load_stage`.
        inputs: Example inputs, of the structure that later ones have.
        server: The address of the server, such as `"host:7070"`.
        at: The cut: an address, a `Cut` or a `Plan`. `"(input)"`, `""` or a plan that is best all on the cloud sends
            the inputs, and the whole model runs on the server.
            `"auto"` measures both devices and the link, cuts where a request is answered soonest, and moves the cut
            when that changes; see `Remote.history`.
        deadline: The time that a request may take, in seconds or such as `"50ms"`. If the server cannot answer in
            time, this device computes the output.
        codec: The codec of the boundary; `"auto"`: the fastest lossless one.
        fallback: `"local"`: compute the output on this device if the server does not answer and all weights are here.
            None: raise.
        tls: Encrypt the connection; implied by `ca`, `cert` and `server_name`.
        ca: PEM file of the authority that signed the server's certificate; None: the system's authorities.
        cert: PEM file of the client certificate, if the server requires one; `key` is its private key.
        token: The token that the server requires.
        server_name: The name to expect in the server's certificate, if it differs from the host.
        any_torch: Allow another version of torch on the server, whose results may differ in the last bits.
        max_reply: The most bytes of a reply, such as `"256MB"`, if the size of an output depends on values. None: twice
            the size that the example and the inputs suggest, and at least 32 MiB.
        timeout: Seconds to wait for the server when connecting.

    >>> import microtome as mt
    >>> from microtome import zoo
    >>> model, x = zoo.build("tiny-resnet")
    >>> with mt.serve(model, x, listen="127.0.0.1:0") as server:
    ...     with connect(model, x, server.address, at="layer1") as remote:
    ...         remote(x).equal(model(x)), remote.requests[-1].where
    (True, 'cloud')
    """
    if fallback not in ("local", None):
        raise BadQuery(f"expected fallback='local' or None, got {fallback!r}")
    deadline_s = parse_seconds(deadline) if isinstance(deadline, str) else deadline
    if deadline_s is not None and not (isinstance(deadline_s, int | float) and deadline_s > 0):
        raise BadQuery(f"expected a deadline of more than 0 seconds, got {deadline!r}")
    connection = Connection(server, Security(tls, ca, cert, key, token, server_name))
    try:
        local = LocalModel(model, inputs)
        hello = handshake(connection, local, timeout, any_torch=any_torch)
        route = _choose_route(local, connection, hello, at, codec)
        max_bytes = None if max_reply is None else parse_size(max_reply)
        options = RequestOptions(deadline_s, fallback == "local", max_bytes)
        remote = Remote(local, connection, hello, route, options)
        remote.warm_up(remote.route)
        return remote
    except BaseException:
        connection.close()
        raise


def _choose_route(local: LocalModel, connection: Connection, hello: Any, at: Any, codec: str) -> Route | Autotuner:
    if codec != "auto":
        parse_codec(codec)
        codecs: tuple[str, ...] = (codec,)
    else:
        codecs = tuple(name for name in LOSSLESS if name in hello.codecs) or ("raw",)
    splitter = local.splitter if local.is_whole else None
    if splitter is not None and isinstance(at, str) and at == "auto":
        return autotune(splitter, connection, codecs, hello.cuts)
    address = local.resolve_cut(at)
    if address not in hello.cuts:
        served = [cut or INPUT for cut in hello.cuts]
        others = f" and {len(served) - 5} others" if len(served) > 5 else ""
        raise RemoteError(
            f"{connection.address} does not serve the cut at {address or INPUT!r}; it serves "
            f"{', '.join(map(repr, served[:5]))}{others}",
            "NO_CUT",
        )
    if len(codecs) == 1 or splitter is None:
        return Route(address, codecs[0])
    return Route(address, fastest_codec(splitter, address, connection, codecs))
