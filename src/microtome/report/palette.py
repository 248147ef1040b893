"""The colours of devices and links, the same in tables, charts, pages and notebooks.

Mid-tones, readable on light and on dark; edge, link and cloud differ in lightness too, for the colour-blind.
"""

from __future__ import annotations

from itertools import cycle, islice

EDGE, LINK, CLOUD = "#2f74c8", "#dba521", "#a86fd0"
#: Devices between the first and the last of a chain.
_MIDDLE = ("#1f9e89", "#d1605e", "#7f8c9a")


def device_colours(count: int) -> list[str]:
    """Return the colours of the devices of a chain: the first is the edge, the last is the cloud.

    >>> device_colours(2) == [EDGE, CLOUD], device_colours(1) == [EDGE], len(set(device_colours(5)))
    (True, True, 5)
    """
    if count < 2:
        return [EDGE][:count]
    return [EDGE, *islice(cycle(_MIDDLE), count - 2), CLOUD]


def variables() -> str:
    """Return the colours as variables of a style sheet."""
    return f":root{{--edge:{EDGE};--link:{LINK};--cloud:{CLOUD}}}"
