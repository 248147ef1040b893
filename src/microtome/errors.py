"""The exceptions that microtome raises.

::

    MicrotomeError
    ├── NotAModule        expected an nn.Module, got something else
    ├── NoMatch           a path, selector or name matches nothing; the message lists the nearest
    │   └── NoTensor      a series of recorded tensors has none at an index
    ├── BadInputs         the inputs are not arguments of the model
    ├── BadWeights        a file of weights cannot be read, or does not fit the model
    ├── NotInstalled      a package that a model or a function needs is not installed
    ├── BuildFailed       code that builds a model cannot be imported or called, or raised
    ├── BadFormula        a formula is of no operator, fails, or returns no count
    ├── BadFile           a file is missing, corrupt, not a result of microtome, or of another version
    ├── BadBoundary       bytes are not a boundary of a split model, or a boundary cannot be serialized
    ├── BadQuery          an argument is invalid, such as an unknown column or a negative depth
    ├── BadSelector       a selector is of an unsupported type
    ├── RemoteError       a server cannot be reached, refuses, or did not reply in time; has the kind of failure
    ├── SessionError      a session is entered twice, or queried in the wrong state
    ├── SensorFailed      a sensor cannot be read, or its reading is impossible
    ├── Unsupported       a model or a run that microtome cannot handle; the message has an alternative
    │   └── NeedsValues   a model cannot be built or run without the values of its tensors
    └── ProbeError        a probe or callback raised; has the address of the observed call

Each also derives from the builtin exception that a caller would expect, such as `TypeError` or `LookupError`.
"""

from __future__ import annotations


def sanitize_text(text: str, keep: str = "") -> str:
    """Replace unprintable characters, such as terminal escapes, line breaks and bidirectional overrides.

    Text from a peer, a file or a model passes through here before it is shown in errors, logs or tables.

    Args:
        keep: Unprintable characters to leave in place.

    >>> sanitize_text("new\\nline, \\x1b[31mred, r\\u202etl")
    'new�line, �[31mred, r�tl'
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep else "\N{REPLACEMENT CHARACTER}" for char in text)


class MicrotomeError(Exception):
    """Base of all exceptions of microtome. The message is sanitized, whatever it quotes."""

    def __init__(self, message: str = "") -> None:
        super().__init__(sanitize_text(message, keep="\n"))


class NotAModule(MicrotomeError, TypeError):
    """Expected an `nn.Module`, got something else."""


class NoMatch(MicrotomeError, LookupError):
    """A path, a selector or a name matches nothing."""


class NoTensor(NoMatch, IndexError):
    """A series of recorded tensors has none at an index."""


class BadFormula(MicrotomeError, TypeError):
    """A formula registered for an operator is invalid."""


class BadFile(MicrotomeError, ValueError):
    """A file is missing, corrupt, not a result of microtome, or of another version."""


class BadBoundary(MicrotomeError, ValueError):
    """Bytes are not a boundary of a split model, or a boundary cannot be serialized."""


class BadQuery(MicrotomeError, ValueError):
    """An argument is invalid, such as an unknown column."""


class BadSelector(MicrotomeError, TypeError):
    """A selector is of an unsupported type."""


class BadInputs(MicrotomeError, ValueError):
    """The inputs are not arguments of the model."""


class BadWeights(MicrotomeError, ValueError):
    """A file of weights cannot be read, or does not fit the model."""


class NotInstalled(MicrotomeError, ImportError):
    """A package that a model or a function needs is not installed."""


class BuildFailed(MicrotomeError, RuntimeError):
    """The code that builds a model cannot be imported or called, or raised."""


class RemoteError(MicrotomeError, ConnectionError):
    """A request to the server of a split model failed.

    Attributes:
        kind: The kind of error in `split.proto`; `"UNREACHABLE"`: no server replies; `"REFUSED"`: it denies access.
    """

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


class SessionError(MicrotomeError, RuntimeError):
    """A session is entered twice, or queried in the wrong state."""


class SensorFailed(MicrotomeError, OSError):
    """A sensor cannot be read, or its reading is impossible."""


class Unsupported(MicrotomeError, RuntimeError):
    """A model or a run that microtome cannot handle."""


class NeedsValues(Unsupported):
    """A model cannot be built or run on tensors without values."""


class ProbeError(MicrotomeError, RuntimeError):
    """A probe or callback raised.

    Attributes:
        address: The address of the observed call: the path of its module and, from the second run on, an index.
    """

    def __init__(self, message: str, address: str) -> None:
        super().__init__(message)
        self.address = address


def describe_value(value: object) -> str:
    """Describe an argument of an invalid type: a number or a string itself, anything else by its class.

    The `repr` of a model has many lines.

    >>> describe_value(5), describe_value({})
    ('5', 'a dict')
    """
    if isinstance(value, str | bytes | int | float | None):
        return f"{value!r:.80}"
    name = type(value).__name__
    return f"{'an' if name[:1] in 'AEIOUaeiou' else 'a'} {name}"


def describe_error(error: BaseException) -> str:
    """Format an exception as one sanitized line: its type, then its message to the end of the first sentence.

    That is the first line, and the next one if the first ends in a colon.
    """
    # str() of a SyntaxError also names the file and line, which its callers report themselves.
    lines = str(error.msg if isinstance(error, SyntaxError) else error).strip().splitlines()
    text = " ".join(line.strip() for line in lines[: 1 + lines[0].rstrip().endswith(":")]) if lines else ""
    text = sanitize_text(text[:300]) + ("…" if len(text) > 300 else "")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
