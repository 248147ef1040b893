"""Seeded mutations of the bytes of files, and of the values of JSON documents."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

#: Values that a reader may not expect: wrong types, huge and negative numbers, deep nesting, paths, control characters.
HOSTILE: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    0.5,
    10**9,
    2**63,
    10**30,
    10**400,
    1e308,
    -1e308,
    "",
    "x",
    "../../etc/passwd",
    "/dev/zero",
    "\x00\x1b[2J\ud800",
    [],
    [[]],
    [-1],
    [10**9, 10**9],
    ["x"],
    [None],
    {},
    {"x": 1},
)


def mutated_bytes(data: bytes, count: int, seed: int = 0) -> Iterator[bytes]:
    """Flips, cuts, repetitions, insertions and overwritten stretches, beginning with the extremes."""
    chance = random.Random(seed)
    yield from (b"", data[:1], data[:-1], data + data, b"\xff" * len(data), b"[" * 100_000, b'{"":' * 100_000)
    for _ in range(count):
        at = chance.randrange(len(data))
        end = min(len(data), at + chance.choice((1, 1, 4, 8, 64)))
        kind = chance.randrange(5)
        if kind == 0:
            yield data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
        elif kind == 1:
            yield data[:at]
        elif kind == 2:
            yield data[:at] + chance.randbytes(end - at) + data[end:]
        elif kind == 3:
            yield data[:at] + chance.choice((b"\x00", b"9" * 30, b"-", b"\xff" * 8, b"\n", b",,")) + data[at:]
        else:
            yield data[:at] + data[end:]


def mutated_json(document: Any, count: int, seed: int = 0) -> Iterator[Any]:
    """The document with one value replaced, removed or repeated; every key of its outer levels first."""
    chance = random.Random(seed)
    places = list(_places(document))
    near = [place for place in places if len(place) <= 2]
    every = [(place, value) for place in near for value in HOSTILE]
    chosen = chance.sample(every, min(len(every), count // 2))
    chosen += [(chance.choice(places), chance.choice(HOSTILE)) for _ in range(count - len(chosen))]
    for place, value in chosen:
        yield _replaced(document, place, value)
    for place in chance.sample(near, min(len(near), 10)):
        yield _removed(document, place)


def dumped(document: Any) -> bytes:
    return json.dumps(document).encode()


Place = tuple[str | int, ...]


def _places(value: Any, above: Place = ()) -> Iterator[Place]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*above, key)
        yield from _places(inner, (*above, key))


def _replaced(document: Any, place: Place, value: Any) -> Any:
    copy = json.loads(json.dumps(document))
    holder = _at(copy, place[:-1])
    holder[place[-1]] = value
    return copy


def _removed(document: Any, place: Place) -> Any:
    copy = json.loads(json.dumps(document))
    del _at(copy, place[:-1])[place[-1]]
    return copy


def _at(value: Any, place: Place) -> Any:
    for key in place:
        value = value[key]
    return value
