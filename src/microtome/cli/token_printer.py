"""Print the tokens of a language model as they are generated."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Self

import click

from microtome.errors import sanitize_text

if TYPE_CHECKING:
    from torch import Tensor

    from microtome.cli.tokenizers import Tokenizer


class TokenPrinter:
    """Prints the prompt and each token: a context manager, and a streamer as transformers takes them.

    Attributes:
        tokens: The tokens so far, without the prompt.
        times: When each came, a time of `perf_counter`.
        started: When the generation began.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt: list[int], *, to_stderr: bool) -> None:
        self._tokenizer = tokenizer
        self._to_stderr = to_stderr
        self._prompt = prompt
        self._line = list(prompt)  # the tokens that the next ones are decoded with: spaces depend on them
        self._num_printed = 0
        self._has_prompt = False
        self.tokens: list[int] = []
        self.times: list[float] = []
        self.started = 0.0

    @property
    def text(self) -> str | None:
        """The new text; None without a tokenizer."""
        if self._tokenizer is None:
            return None
        before = self._tokenizer.decode(self._prompt)
        return self._tokenizer.decode([*self._prompt, *self.tokens])[len(before) :]

    def __enter__(self) -> Self:
        """Print the prompt."""
        self._print(" ".join(map(str, self._prompt)) if self._tokenizer is None else self._decoded(is_last=True))
        self.started = perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        """Print the rest, and end the line, also after an error."""
        self._print(("" if self._tokenizer is None else self._decoded(is_last=True)) + "\n")

    def put(self, tokens: Tensor) -> None:
        if not self._has_prompt:  # which comes first
            self._has_prompt = True
            return
        self.times.append(perf_counter())
        new = tokens.flatten().tolist()
        self.tokens += new
        self._line += new
        self._print("".join(f" {token}" for token in new) if self._tokenizer is None else self._decoded())

    def end(self) -> None:
        """Do nothing: the end of the block prints the rest."""

    def _decoded(self, *, is_last: bool = False) -> str:
        """The text that has not been printed; a character of which only some bytes are here waits for the others."""
        assert self._tokenizer is not None
        text = self._tokenizer.decode(self._line)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and not is_last:
            return ""
        new = text[self._num_printed :]
        self._num_printed = len(text)
        if text.endswith("\n"):
            self._line, self._num_printed = [], 0
        return new

    def _print(self, text: str) -> None:
        click.echo(sanitize_text(text, keep="\n"), nl=False, err=self._to_stderr)
