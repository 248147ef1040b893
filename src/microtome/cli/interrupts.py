"""Ctrl-C: end the program with one line and the exit code of a process that SIGINT ended."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import click

#: As shells count a process that a signal ended: 128 and the number of the signal.
_EXIT_CODE = 128 + signal.SIGINT


class Interrupted(click.ClickException):
    exit_code = _EXIT_CODE

    def __init__(self) -> None:
        super().__init__("Interrupted")

    def show(self, file: Any = None) -> None:
        click.echo(self.message, file=file, err=file is None)


@contextmanager
def translate_interrupts() -> Iterator[None]:
    """Raise Interrupted in place of KeyboardInterrupt, for which click prints "Aborted!" and exits with 1."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise Interrupted from error


def import_torch() -> None:
    """Import torch; Ctrl-C meanwhile ends the process at once.

    The initialization of torch runs C++ code that discards exceptions, and KeyboardInterrupt with them. There is
    nothing to clean up yet.
    """
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if "torch" in sys.modules or not is_default or threading.current_thread() is not threading.main_thread():
        return
    signal.signal(signal.SIGINT, _exit_at_once)
    try:
        import torch  # noqa: F401
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit_at_once(*_: object) -> NoReturn:
    sys.stderr.write("Interrupted\n")
    sys.stderr.flush()
    os._exit(_EXIT_CODE)
