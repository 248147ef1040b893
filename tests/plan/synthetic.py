"""Synthetic cuts, profiles and codec costs, with costs that can be computed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from microtome.results.codec_costs import CodecCost, CodecCosts
from microtome.results.cuts import Cut, Cuts, Live
from microtome.results.measurements import EnergyUse
from microtome.results.metrics import Amounts
from microtome.results.profile import Coverage, Profile
from microtome.results.rows import Row, Tensor

PARAM_BYTES = 100


def layers(count: int) -> list[str]:
    return [f"l{at}" for at in range(count)]


def live(name: str, source: str | None, nbytes: int) -> Live:
    """A value of so many bytes, of floats if they divide evenly."""
    return Live(name, source, *(((nbytes,), "uint8") if nbytes % 4 else ((nbytes // 4,), "float32")), nbytes)


def cuts(sizes: Sequence[int], *, inputs: int = 1000, outputs: int = 40, refused: Sequence[str] = ()) -> Cuts:
    """The cuts of a chain of layers, one per size, with 100 bytes of parameters each; the last layer is the end."""
    names, count = layers(len(sizes)), len(sizes)
    found = []
    for at, (name, nbytes) in enumerate(zip(names, sizes, strict=True)):
        head = PARAM_BYTES * (at + 1)
        found.append(
            Cut(
                index=at,
                at=name,
                type="Linear",
                depth=1,
                live=(live(name, name, nbytes),),
                nbytes=nbytes,
                head_macs=at + 1,
                tail_macs=count - at - 1,
                head_params=head // 4,
                tail_params=PARAM_BYTES * count // 4 - head // 4,
                head_param_bytes=head,
                tail_param_bytes=PARAM_BYTES * count - head,
                refused="it is said so" if name in refused else None,
            )
        )
    return Cuts(
        "Chain",
        (live("args[0]", None, inputs),),
        (live("output[0]", "", outputs),),
        tuple(cut for cut in found if cut.refused is None),
        tuple(cut for cut in found if cut.refused is not None),
        "made",
    )


def profile(
    seconds: Sequence[float],
    *,
    device: Sequence[float] | None = None,
    joules: Sequence[float] | None = None,
    net: Sequence[float] | None = None,
    peaks: Sequence[int] | None = None,
    backward: Sequence[float] | None = None,
    saved: Sequence[int] | None = None,
    frozen: Sequence[bool] | None = None,
    inputs: int = 1000,
    **facts: Any,
) -> Profile:
    """The profile of the same chain."""
    count = len(seconds)
    until, until_device = list(accumulate(seconds)), list(accumulate(device or ()))
    taken = live("args[0]", None, inputs)
    given = (Tensor(taken.shape, taken.dtype),)
    params = PARAM_BYTES * count

    def row(at: int, name: str) -> Row:
        amounts: dict[str, Any] = {
            "params": PARAM_BYTES // 4,
            "trainable_params": 0 if frozen and frozen[at] else PARAM_BYTES // 4,
            "param_bytes": PARAM_BYTES,
            "macs": 1,
            "time_s": seconds[at],
            "device_s": device[at] if device else None,
            "energy_j": joules[at] if joules else None,
            "net_energy_j": net[at] if net else None,
            "backward_s": backward[at] if backward else None,
            "saved_bytes": saved[at] if saved else None,
        }
        return Row(
            **amounts,
            address=name,
            path=name,
            type="Linear",
            depth=1,
            parent="",
            own=Amounts(**amounts),
            peak_bytes=params + (peaks[at] if peaks else 0),
            elapsed_s=until[at],
            elapsed_device_s=until_device[at] if device else None,
        )

    root = Row(
        params=params // 4,
        param_bytes=params,
        macs=count,
        time_s=until[-1],
        energy_j=sum(joules) if joules else None,
        net_energy_j=sum(net) if net else None,
        backward_s=sum(backward) if backward else None,
        saved_bytes=sum(saved) if saved else None,
        type="Chain",
        height=2,
        inputs=given,
        peak_bytes=params + max(peaks or (0,)),
        elapsed_s=until[-1],
        elapsed_device_s=until_device[-1] if device else None,
    )
    facts.setdefault("environment", {"cpu": "a CPU"})
    if joules or net:
        facts.setdefault("energy", EnergyUse("share", "a meter", None, None, None, None, None, {}))
    rows = (root, *(row(at, name) for at, name in enumerate(layers(count))))
    return Profile("Chain", "Inputs(x)", "microtome", "made", Coverage(0, (), ()), rows, **facts)


def costs(cuts: Cuts, *, ratio: float = 0.5, encode_s: float = 0.0, decode_s: float = 0.0) -> CodecCosts:
    """Costs of raw, which are 0, and of zstd, with a compression ratio and seconds per byte."""
    values = {value.name: value for value in (*cuts.inputs, *(value for cut in cuts for value in cut.live))}
    raw = {name: CodecCost(value.nbytes, 0.0, 0.0) for name, value in values.items()}
    packed = {
        name: CodecCost(int(value.nbytes * ratio), value.nbytes * encode_s, value.nbytes * decode_s)
        for name, value in values.items()
    }
    return CodecCosts("Chain", "made values", {"raw": raw, "zstd": packed}, {"cpu": "a CPU"})
