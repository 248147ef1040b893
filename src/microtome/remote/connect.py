"""`connect`: a model that runs partly here and partly on one or more servers."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, overload

from torch import nn

from microtome.addresses import INPUT
from microtome.endpoints import explain_endpoint
from microtome.errors import BadQuery, RemoteError, describe_value
from microtome.remote.autotune import LOSSLESS, Autotuner, autotune, fastest_codec
from microtome.remote.chain import Chain
from microtome.remote.client import Remote
from microtome.remote.connection import Connection
from microtome.remote.handshake import handshake
from microtome.remote.local_model import LocalModel, planned_chain
from microtome.remote.request import RequestOptions, Route
from microtome.remote.security import Security
from microtome.remote.server_pool import Check, ServerPool
from microtome.remote.stage_ref import StageRef, describe_stage
from microtome.remote.training.client import RemoteTraining
from microtome.remote.training.connect import TrainingConnection, connect_training
from microtome.remote.training.trained_stage import OptimizerOrFactory
from microtome.results.metrics import advise
from microtome.results.plan import Plan
from microtome.split.boundary.codecs import parse_codec
from microtome.split.stage import Stage
from microtome.units import parse_seconds, parse_size, plural

#: Seconds that a server which is back has to answer the handshake; if it does not, it is asked again.
_CHECK_S = 2.0

#: One server, or several of which any may answer.
Servers = str | Sequence[str]


@overload
def connect(
    model: nn.Module | Stage | Sequence[Stage],
    inputs: Any,
    server: str | None = None,
    at: Any = "auto",
    *,
    servers: Sequence[Servers] | None = None,
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
    timeout: float | str = 10.0,
    train: Literal[False] = False,
) -> Remote: ...


@overload
def connect(
    model: nn.Module,
    inputs: Any,
    server: str,
    at: Any,
    *,
    codec: str = "auto",
    tls: bool = False,
    ca: str | None = None,
    cert: str | None = None,
    key: str | None = None,
    token: str | None = None,
    server_name: str | None = None,
    any_torch: bool = False,
    max_reply: int | str | None = None,
    timeout: float | str = 10.0,
    train: Literal[True],
    optimizer: OptimizerOrFactory | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
) -> RemoteTraining: ...


def connect(
    model: nn.Module | Stage | Sequence[Stage],
    inputs: Any,
    server: str | None = None,
    at: Any = "auto",
    *,
    servers: Sequence[Servers] | None = None,
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
    timeout: float | str = 10.0,
    train: bool = False,
    optimizer: OptimizerOrFactory | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
) -> Remote | RemoteTraining:
    """Run a model partly here and partly on a server, or on several.

    Args:
        model: The model that the servers have, in eval mode; or its first stage, from `mt.load_stage`; or a list of its
            first and its last stage, if this device runs both.
        inputs: Example inputs, of the structure that later ones have.
        server: The address of the server, such as `"host:7070"`.
        at: The cut: an address, a `Cut` or a `Plan`; several for several servers. `"(input)"`, `""` or a plan that is
            best all on the cloud sends the inputs, and the whole model runs on the server.
            `"auto"` measures both devices and the link, cuts where a request is answered soonest, and moves the cut
            when that changes; see `Remote.history`.
        servers: The servers of a chain, in place of `server`: one for each cut, which runs the stage after it. With one
            server less, this device runs the last stage, too, so that neither inputs nor outputs leave it. Several
            servers of one stage, as a list, are used in turn; one that is down, also at the start, is left out until
            it is back with the same model.
        deadline: The time that a request may take, in seconds or such as `"50ms"`. If the server cannot answer in
            time, this device computes the output.
        codec: The codec of the boundaries; `"auto"`: those of the plan, or without one the fastest lossless one, of a
            chain as measured at the first cut.
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
        timeout: The time to wait for the server when connecting, in seconds or such as `"5s"`; with `train=True`, also
            while it is down later.
        train: Train the head here, and the tail on a server with `optimizer=`; the result is a `RemoteTraining`. There
            is one server, and one cut at a layer. `codec` is lossless; `deadline` and `fallback` are unused.
        optimizer: Of the head: an optimizer, or a function that makes it from a list of parameters. None: you step it.
        checkpoint: The folder where the head and its optimizer are saved when the server saves its side, or after every
            step if it does not. With checkpoints there, training goes on from the last step that both sides have.

    >>> import microtome as mt
    >>> from microtome import zoo
    >>> model, x = zoo.build("tiny-resnet")
    >>> with mt.serve(model, x, listen="127.0.0.1:0") as server:
    ...     with connect(model, x, server.address, at="layer1") as remote:
    ...         remote(x).equal(model(x)), remote.requests[-1].where
    (True, 'cloud')

    Two stages here, and one on a server:

    >>> with mt.serve(model, x, listen="127.0.0.1:0") as server:
    ...     with connect(model, x, servers=[server.address], at=["stem", "layer1"]) as remote:
    ...         remote(x).equal(model(x))
    True
    """
    if not train and (optimizer, checkpoint) != (None, None):
        raise BadQuery("expected train=True with optimizer= or checkpoint=")
    if fallback not in ("local", None):
        raise BadQuery(f"expected fallback='local' or None, got {fallback!r}")
    deadline_s = None if deadline is None else _parse_time("a deadline", deadline)
    timeout_s = _parse_time("a timeout", timeout)
    if codec != "auto":
        parse_codec(codec)
    stages = _check_servers(inputs, server, servers)
    security = Security(tls, ca, cert, key, token, server_name)
    max_bytes = None if max_reply is None else parse_size(max_reply)
    if train:
        if len(stages) != 1 or len(stages[0]) != 1 or deadline_s is not None:
            raise BadQuery("expected one server and no deadline with train=True")
        training = TrainingConnection(optimizer, checkpoint, codec, any_torch, max_bytes, timeout_s)
        return connect_training(model, inputs, stages[0][0], at, security, training)
    cuts, stages, planned = _resolve_plan(at, stages)
    codecs = planned if codec == "auto" else (codec,)
    _check_auto(cuts, len(stages) if isinstance(model, nn.Module) else 1)
    chain = _open_chain(stages, security)
    try:
        local = LocalModel(model, inputs)
        check = partial(handshake, model=local, any_torch=any_torch)
        for reason in (reason for pool in chain.pools for reason in pool.open(partial(check, timeout=timeout_s))):
            warnings.warn(f"left out until it is back: {reason}", RuntimeWarning, stacklevel=2)
        route = _choose_route(local, chain, cuts, codecs)
        routes = route.routes if isinstance(route, Autotuner) else (route,)
        for hop, pool in enumerate(chain.pools):
            pool.watch(_check_again(check, routes, hop))
        options = RequestOptions(deadline_s, fallback == "local", max_bytes)
        remote = Remote(local, chain, route, options)
        remote.warm_up(remote.route)
        return remote
    except BaseException:
        chain.close()
        raise


def _parse_time(name: str, time: float | str) -> float:
    """Parse a time of more than 0."""
    try:
        parsed = parse_seconds(time)
    except BadQuery:
        parsed = 0.0
    if not parsed:
        raise BadQuery(f"expected {name} of more than 0 seconds, such as 0.5 or '500ms', got {describe_value(time)}")
    return parsed


def _check_servers(inputs: Any, server: str | None, servers: Sequence[Servers] | None) -> list[tuple[str, ...]]:
    """Return the addresses of the servers of each stage."""
    if servers is None:
        if isinstance(server, list | tuple):
            raise BadQuery(f"expected one address as server=, got {server!r}: pass several as servers=[…]")
        if error := explain_endpoint(server):
            if not isinstance(server, str) and isinstance(inputs, str) and not explain_endpoint(inputs):
                raise BadQuery(f"expected inputs before the address, as in mt.connect(model, x, {inputs!r:.80})")
            raise BadQuery(error)
        assert server is not None
        return [(server,)]
    if server is not None:
        raise BadQuery(f"expected server= for one server, or servers= for several, got both {server!r} and {servers!r}")
    if not isinstance(servers, list | tuple) or not servers or not all(servers):
        raise BadQuery(f"expected a list of the servers of each stage, such as ['a:7070', 'b:7070'], got {servers!r}")
    stages = [tuple(stage) if isinstance(stage, list | tuple) else (stage,) for stage in servers]
    for joined in (one for stage in stages for one in stage if isinstance(one, str) and "," in one):
        raise BadQuery(
            f"expected one address, got {joined!r}: pass several servers of a stage as a list in the list, such as "
            "[['a:7070', 'b:7070']]"
        )
    return stages


def _check_auto(at: Any, servers: int) -> None:
    """Raise if the one cut that `"auto"` chooses is not all that is asked for."""
    name_all = advise("name every cut, at=[…]", "name every cut, each with --at")
    if isinstance(at, list | tuple) and "auto" in at and len(at) > 1:
        raise BadQuery(f"'auto' chooses one cut, and cannot be among others: {name_all}, or use one server and 'auto'")
    if isinstance(at, str) and at == "auto" and servers > 1:
        raise BadQuery(
            f"expected {servers} cuts for {servers} servers, got at='auto', which chooses one: {name_all}, or use one "
            "server"
        )


class _Placement(NamedTuple):
    """The cuts, the servers of the stages after them, and the codecs at the cuts if a plan has chosen them."""

    cuts: Any
    stages: list[tuple[str, ...]]
    codecs: tuple[str, ...] = ()


def _resolve_plan(at: Any, stages: list[tuple[str, ...]]) -> _Placement:
    """Return the cuts and codecs of a plan, and the servers of the devices that run something in it."""
    if not isinstance(at, Plan):
        return _Placement(at, stages)
    cuts, codecs, devices = planned_chain(at)
    if len(stages) == 1 and len(cuts) == 1:
        return _Placement(cuts, stages, codecs)
    if len(stages) != len(at.devices) - 1:
        raise BadQuery(
            f"expected a server for each device of the plan after the first, {', '.join([*at.devices][1:])}, got "
            f"{plural(len(stages), 'server')}"
        )
    return _Placement(cuts, [stages[device] for device in devices], codecs)


def _open_chain(stages: list[tuple[str, ...]], security: Security) -> Chain:
    connections: list[Connection] = []
    try:
        pools = []
        for addresses in stages:
            pools.append(ServerPool([Connection(address, security) for address in addresses]))
            connections.extend(pools[-1].connections)
        return Chain(pools)
    except BaseException:
        for connection in connections:
            connection.close()
        raise


def _choose_route(local: LocalModel, chain: Chain, at: Any, codecs: tuple[str, ...]) -> Route | Autotuner:
    """Return the cuts and their codecs.

    Args:
        codecs: One for all cuts, or one for each; empty: choose the fastest lossless one.
    """
    candidates = codecs or _lossless_codecs(chain)
    connection = chain.pools[0].ready[0]
    splitter = local.splitter if local.is_whole else None
    if splitter is not None and isinstance(at, str) and at == "auto":
        for server in chain.pools[0].ready:
            _check_any_stage(server)
        served = set.intersection(*(set(one.hello.cuts) for one in chain.pools[0].ready))
        return autotune(splitter, connection, candidates, [cut for cut in connection.hello.cuts if cut in served])
    first, *later = local.resolve_cuts(at)
    route = Route(first, candidates[0], tuple(later), codecs[1:])
    _check_served(chain, route)
    if codecs or len(candidates) == 1 or splitter is None:
        return route
    return route._replace(codec=fastest_codec(splitter, first, connection, candidates))


def _check_any_stage(server: Connection) -> None:
    """Raise if a server has stages alone, which it cannot profile to find the best cut."""
    if not server.hello.any_stage:
        cuts = ", ".join(repr(at or INPUT) for at in server.hello.cuts)
        advice = advise("at=", "--at")
        raise BadQuery(
            f"expected {advice} for {server.address}, got 'auto': it serves stages, and cannot be profiled; choose one "
            f"of {cuts}"
        )


def _lossless_codecs(chain: Chain) -> tuple[str, ...]:
    """Return the lossless codecs that all servers have."""
    replies = [connection.hello for pool in chain.pools for connection in pool.ready]
    return tuple(name for name in LOSSLESS if all(name in reply.codecs for reply in replies)) or ("raw",)


def _check_served(chain: Chain, route: Route) -> None:
    """Raise unless there is a server for each stage that this device does not run, and each serves its stage."""
    cuts, servers = 1 + len(route.later), len(chain.pools)
    if servers not in (cuts, cuts - 1):
        fewer = f", or {cuts - 1} if this device runs the last stage" if cuts > 1 else ""
        hint = f": {advise('name every cut, at=[…]', 'name every cut, each with --at')}" if servers > cuts else ""
        raise BadQuery(f"expected {plural(cuts, 'server')} for {plural(cuts, 'cut')}{fewer}, got {servers}{hint}")
    for hop, pool in enumerate(chain.pools):
        for connection in pool.ready:
            _check_hop(connection.address, connection.hello, route, hop)


def _check_again(check: Callable[..., Any], routes: Sequence[Route], hop: int) -> Check:
    """Return the check of a server that is back: that of the start, and whether it can answer on these routes."""

    def accept(address: str, hello: Any) -> None:
        for route in routes:
            _check_hop(address, hello, route, hop)

    return lambda connection: check(connection, timeout=_CHECK_S, accept=partial(accept, connection.address))


def _check_hop(address: str, hello: Any, route: Route, hop: int) -> None:
    """Raise if a server cannot answer at its place of a route."""
    _check_stage(address, hello, StageRef(route.cuts, route.first_stage + hop))
    names = {name for codec in (route.codecs[hop], route.reply_codec(hop)) for name in codec.split("+")}
    if missing := sorted(names - {"raw", *hello.codecs}):
        known = ", ".join(hello.codecs)
        raise RemoteError(f"{address} does not have the codec {missing[0]!r}; it has {known}", "REFUSED")


def _check_stage(address: str, hello: Any, stage: StageRef) -> None:
    if stage.begins_at not in hello.cuts:
        served = [cut or INPUT for cut in hello.cuts]
        others = f" and {len(served) - 5} others" if len(served) > 5 else ""
        order = ". Pass the servers in the order of their stages" if {*stage.cuts} & {*hello.cuts} else ""
        raise RemoteError(
            f"{address} does not serve the cut at {stage.begins_at or INPUT!r}; it serves "
            f"{', '.join(map(repr, served[:5]))}{others}{order}",
            "NO_CUT",
        )
    if not hello.any_stage and hello.ends_at != (stage.ends_at or ""):
        only = describe_stage(stage.begins_at, hello.ends_at or None)
        raise RemoteError(f"{address} serves the stage {only}, not the one {stage}", "NO_CUT")
