"""The tokenizers of `microtome generate`: that of a folder of transformers, or that of `zoo:tiny-writer`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from microtome.errors import BadFile, describe_error

#: Files that a tokenizer of transformers is read from.
_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


class _Encode(Protocol):
    def __call__(self, text: str, /) -> list[int]: ...


class _Decode(Protocol):
    def __call__(self, tokens: list[int], /) -> str: ...


class Tokenizer(NamedTuple):
    """Converts between text and tokens."""

    encode: _Encode
    decode: _Decode


def find_tokenizer(name: str, model: Any) -> Tokenizer | None:
    """Return the tokenizer of a model by its name on the command line; None: it has none."""
    from microtome.zoo.writer import Writer

    if isinstance(model, Writer):
        return Tokenizer(model.encode, model.decode)
    source, _, folder = name.partition(":")
    if source != "hf" or not any((Path(folder) / file).is_file() for file in _FILES):
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise BadFile(f"cannot read the tokenizer in {folder}: {describe_error(error)}") from error
    return Tokenizer(tokenizer.encode, partial(tokenizer.decode, skip_special_tokens=True))
