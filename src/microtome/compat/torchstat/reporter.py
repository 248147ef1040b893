"""Format nodes as torchstat's report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from microtome.compat.torchstat.stat_tree import StatNode

_COLUMNS = ("module name", "input shape", "output shape", "params", "memory(MB)", "MAdd", "Flops", "MemRead(B)", "MemWrite(B)", "duration[%]", "MemR+W(B)")  # fmt: skip  # noqa: E501


def report_format(collected_nodes: Iterable[StatNode]) -> str:
    """Return a table with a row for each node and one for the total, followed by the totals.

    >>> conv = StatNode("conv")
    >>> conv.input_shape, conv.output_shape, conv.parameter_quantity = (3, 224, 224), (10, 220, 220), 760
    >>> conv.MAdd, conv.Flops, conv.Memory, conv.duration = 72_600_000, 36_784_000, (605_152, 1_936_000), 0.1
    >>> print(report_format([conv]).partition("=")[0])  # doctest: +NORMALIZE_WHITESPACE
          module name  input shape output shape  params  memory(MB)        MAdd       Flops  ...
    0            conv    3 224 224   10 220 220     760        0.00  72,600,000  36,784,000  ...
    total                                           760        0.00  72,600,000  36,784,000  ...
    """
    total = StatNode("total")
    total.children = list(collected_nodes)
    rows = [
        [str(index), node.name, _shape(node.input_shape), _shape(node.output_shape), *_numbers(node, total.duration)]
        for index, node in enumerate(total.children)
    ]
    lines = _aligned([["", *_COLUMNS], *rows, ["total", "", "", "", *_numbers(total, total.duration)]])
    width = len(lines[0])
    return "\n".join(
        [
            *lines,
            "=" * width,
            f"Total params: {total.parameter_quantity:,}",
            "-" * width,
            f"Total memory: {total.inference_memory:.2f}MB",
            f"Total MAdd: {round_value(total.MAdd)}MAdd",
            f"Total Flops: {round_value(total.Flops)}Flops",
            f"Total MemR+W: {round_value(sum(total.Memory), binary=True)}B",
            "",
        ]
    )


def _numbers(node: StatNode, duration: float) -> list[str]:
    read, written = node.Memory
    return [
        str(node.parameter_quantity),
        f"{node.inference_memory:.2f}",
        f"{node.MAdd:,}",
        f"{node.Flops:,}",
        str(read),
        str(written),
        f"{node.duration / duration if duration else 0:.2%}",
        str(read + written),
    ]


def _shape(shape: Sequence[int] | None) -> str:
    return " ".join(f"{size:>3d}" for size in shape or ())


def _aligned(rows: list[list[str]]) -> list[str]:
    """Align the columns, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    template = "  ".join([f"{{:<{widths[0]}}}", *(f"{{:>{width}}}" for width in widths[1:])])
    return [template.format(*row) for row in rows]


def round_value(value: float, binary: bool = False) -> str:
    """Format a number with two decimals and a unit prefix.

    Args:
        binary: Whether K is 1024, as for bytes.

    >>> round_value(190_578_940), round_value(95_998_220), round_value(2048, True), round_value(999)
    ('190.58M', '96.0M', '2.0K', '999')
    """
    step = 1024 if binary else 1000
    letters = ["", "K", "M", "G", "T"]
    power = 0
    while power < len(letters) - 1 and value >= step ** (power + 1):
        power += 1
    return f"{round(value / step**power, 2)}{letters[power]}" if power else str(value)
