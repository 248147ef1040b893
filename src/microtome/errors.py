"""Everything microtome raises on purpose.

::

    MicrotomeError
    ├── NotAModule        something that is not an nn.Module was given as a model or as a selector's target
    ├── NoMatch           a path, selector or name that matches nothing; lists the nearest
    ├── BadInputs         inputs that cannot be read as the arguments of a model
    ├── BadWeights        a file of weights that does not fit the model
    ├── NotInstalled      a package that a model comes from is not there
    ├── BuildFailed       the code that makes a model cannot be imported, called so, or raised
    ├── BadFormula        a formula for no operator, or one that fails or gives no count
    ├── BadFile           a file that is not there, is no result of microtome, or is of another version
    ├── BadBoundary       bytes that are no boundary of a split model, or are damaged; or one that cannot be sent
    ├── BadQuery          a question to a result that it has no answer to: an unknown column, a depth below zero
    ├── BadSelector       a selector of a kind that microtome does not know
    ├── RemoteError       a server that cannot be reached, refuses, or could not answer in time; carries the kind
    ├── SessionError      a session entered twice, or asked something it cannot answer in its state
    ├── SensorFailed      a sensor that cannot be read, or that says what cannot be
    ├── Unsupported       what cannot be looked into (a ScriptModule, a graph too deep), with what to do instead
    └── ProbeError        a probe or callback raised; carries the address of the call it was looking at

Each also derives from the builtin a caller would expect (`TypeError`, `LookupError`, `RuntimeError`).
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
    """Base of every error that microtome raises on purpose. Its message can be printed, whatever it quotes."""

    def __init__(self, message: str = "") -> None:
        super().__init__(sanitize_text(message, keep="\n"))


class NotAModule(MicrotomeError, TypeError):
    """A model was expected and something else was given."""


class NoMatch(MicrotomeError, LookupError):
    """A path, a selector or a name matches nothing."""


class BadFormula(MicrotomeError, TypeError):
    """A formula registered for an operator is invalid."""


class BadFile(MicrotomeError, ValueError):
    """A file that cannot be read as a result."""


class BadBoundary(MicrotomeError, ValueError):
    """Bytes that cannot be read as what crosses a cut, or what crosses it cannot be made bytes."""


class BadQuery(MicrotomeError, ValueError):
    """A question that a result has no answer to."""


class BadSelector(MicrotomeError, TypeError):
    """A selector of a kind that microtome does not know."""


class BadInputs(MicrotomeError, ValueError):
    """Inputs that cannot be read as the arguments of a model."""


class BadWeights(MicrotomeError, ValueError):
    """A file of weights that cannot be read, or does not fit the model."""


class NotInstalled(MicrotomeError, ImportError):
    """A package that a model comes from is not installed."""


class BuildFailed(MicrotomeError, RuntimeError):
    """Somebody's code that was to make a model did not."""


class RemoteError(MicrotomeError, ConnectionError):
    """The other side of a split model did not answer.

    Attributes:
        kind: What happened, as `split.proto` names it; `"UNREACHABLE"`: nobody answers; `"REFUSED"`: it will not.
    """

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


class SessionError(MicrotomeError, RuntimeError):
    """A session was used in a way its state does not allow."""


class SensorFailed(MicrotomeError, OSError):
    """A sensor that cannot be read, or that says what cannot be."""


class Unsupported(MicrotomeError, RuntimeError):
    """A model or a run that cannot be looked into as it is."""


class ProbeError(MicrotomeError, RuntimeError):
    """A probe or callback raised while it looked at a call.

    Attributes:
        address: Where the call is: the module's path and, from its second run on, the index.
    """

    def __init__(self, message: str, address: str) -> None:
        super().__init__(message)
        self.address = address


def describe_error(error: BaseException) -> str:
    """Format an exception as one sanitized line: its type, then the first line of its message."""
    # str() of a SyntaxError also names the file and line, which its callers report themselves.
    lines = str(error.msg if isinstance(error, SyntaxError) else error).strip().splitlines()
    text = lines[0] if lines else ""
    text = sanitize_text(text[:300]) + ("…" if len(text) > 300 else "")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
