"""Profiles of many models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from microtome.errors import NoMatch
from microtome.results.base import Result
from microtome.results.phases import pass_seconds
from microtome.results.profile import Profile
from microtome.units import plural, some


@dataclass(frozen=True)
class ProfileFailure:
    """Why a model could not be profiled.

    Attributes:
        kind: The type of the exception.
        reason: Its message, in one line.
    """

    kind: str
    reason: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.reason}" if self.reason else self.kind


@dataclass(frozen=True)
class ProfiledModel:
    """A model and its profile, or why there is none.

    Attributes:
        node: The host name of the machine that profiled it; None: unknown.
    """

    name: str
    profile: Profile | None
    failure: ProfileFailure | None = None
    node: str | None = None

    @property
    def time_s(self) -> float | None:
        """The seconds of a pass; None: not measured."""
        return None if self.profile is None else pass_seconds(self.profile)

    @property
    def energy_j(self) -> float | None:
        """The joules of a pass; None: not measured."""
        return None if self.profile is None else self.profile.total.energy_j


@dataclass(frozen=True)
class Profiles(Result, kind="profiles"):
    """Profiles of many models, a mapping from their names.

    Attributes:
        models: The models, in the order in which they were named.
    """

    models: tuple[ProfiledModel, ...]

    def __getitem__(self, name: str) -> Profile | ProfileFailure:
        """Return the profile of a model, or why there is none."""
        models = {model.name: model for model in self.models}
        if name not in models:
            raise NoMatch(f"no model is named {name!r}: expected one of {some(list(models), 20)}")
        result = models[name].profile or models[name].failure
        assert result is not None, "checked when it is built or read"
        return result

    def __iter__(self) -> Iterator[str]:
        return (model.name for model in self.models)

    def __len__(self) -> int:
        return len(self.models)

    def __contains__(self, name: object) -> bool:
        return name in set(self)

    def keys(self) -> list[str]:
        """Return the names of the models."""
        return list(self)

    def values(self) -> list[Profile | ProfileFailure]:
        """Return the profiles and failures, in order."""
        return [self[name] for name in self]

    def items(self) -> list[tuple[str, Profile | ProfileFailure]]:
        """Return each name with its profile or failure."""
        return [(name, self[name]) for name in self]

    @property
    def failures(self) -> dict[str, ProfileFailure]:
        """Why models could not be profiled, by their names."""
        return {model.name: model.failure for model in self.models if model.failure is not None}

    def as_dict(self) -> dict[str, Any]:
        data = super().as_dict()
        for one, model in zip(data["models"], self.models, strict=True):
            one["profile"] = None if model.profile is None else model.profile.as_dict()
        return data

    def check(self) -> None:
        names = list(self)
        if len(set(names)) < len(names):
            raise ValueError("expected different names of models")
        for model in self.models:
            if (model.profile is None) == (model.failure is None):
                raise ValueError(f"expected a profile or a failure of {model.name!r:.80}")
            if model.profile is not None:
                model.profile.check()

    def __repr__(self) -> str:
        failed = f", {len(self.failures)} failed" if self.failures else ""
        return f"<Profiles of {plural(len(self), 'model')}{failed}>"
