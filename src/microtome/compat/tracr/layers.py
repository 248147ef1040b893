"""Which calls of a model are its layers, and what is known of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from microtome.profile import Profile, Row


def layers_in(profile: Profile, row: Row, depth: int) -> Iterator[Row]:
    """The calls inside a call that are layers: those that deep, and those above with no calls inside."""
    for child in profile.children(row):
        if child.height == 1 or child.path.count(".") + 1 >= depth:
            yield child
        else:
            yield from layers_in(profile, child, depth)


def metrics(profile: Profile, layers: tuple[str, ...], ran: range) -> dict[int, dict[str, Any]]:
    """What a profile knows of the layers that ran, by their numbers."""
    depths = {profile[exact(layers[at])].depth for at in ran}
    records = {record["layer_name"]: record for depth in depths for record in profile.layer_metrics(depth)}
    return {at: records[layers[at]] | {"layer_id": at} for at in ran}


def exact(address: str) -> str:
    """The address of a call, said so that it is not taken for one of several."""
    return address if "#" in address else f"{address}#0"
