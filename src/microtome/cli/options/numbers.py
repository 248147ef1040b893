"""Numbers on the command line, with errors that say which are expected."""

from __future__ import annotations

from typing import Any

import click


class WholeNumber(click.IntRange):
    """A whole number of at least `min`."""

    def __init__(self, min: int) -> None:  # noqa: A002  as click names it
        super().__init__(min=min)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            int(value)
        except ValueError:
            self.fail(f"expected a whole number of {self.min} or more, got {value!r}", param, ctx)
        return super().convert(value, param, ctx)


class Number(click.FloatRange):
    """A number in a range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            float(value)
        except ValueError:
            self.fail(f"expected a number, got {value!r}", param, ctx)
        return super().convert(value, param, ctx)
