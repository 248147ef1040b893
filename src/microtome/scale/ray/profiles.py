"""Profile many models on the workers of a Ray cluster."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from inspect import signature
from typing import Any

import torch
from torch import nn

from microtome.engine.selectors import check_model
from microtome.errors import BadQuery, describe_error, describe_value, sanitize_text
from microtome.inputs import Inputs
from microtome.profile.passes import Progress
from microtome.profile.profile import parse_options
from microtome.profile.profile import profile as profile_model
from microtome.report.progress import show_progress
from microtome.results.profile import Profile
from microtome.results.profiles import ProfiledModel, ProfileFailure, Profiles
from microtome.scale.ray.arguments import check_names
from microtome.scale.ray.packages import import_ray
from microtome.scale.ray.recording import MAX_RETRIES
from microtome.scale.ray.resources import check_room, task_demand
from microtome.zoo.resolver import resolve

#: Options of `mt.profile` whose results are no profile, or that a worker cannot use.
_REFUSED = ("phases", "progress")


def profile(
    models: Iterable[str] | Mapping[str, tuple[nn.Module, Any]],
    inputs: Any = None,
    *,
    num_cpus: float = 1,
    num_gpus: float = 0,
    progress: Progress | None = None,
    **options: Any,
) -> Profiles:
    """Profile many models, each in a task of its own; return their profiles by name, which print as a table.

    A model that cannot be built or run does not end the others: its place has the reason. A worker that is killed, for
    instance because the model takes too much memory, is started again a few times.

    Args:
        models: Names such as `torchvision:resnet50`, or modules and their inputs by name.
        inputs: The inputs of all named models; None: the example inputs of each.
        num_cpus: The CPUs of a task. For times that can be compared, as many as a node has: then one model runs there
            at once.
        num_gpus: The GPUs of a task; the model and its inputs are moved to it.
        progress: Called with the name of the last model, the number of models done, and that of all; None: a bar on a
            terminal.
        options: Those of `mt.profile`, such as `measure=["time"]`.
    """
    ray = import_ray()
    named = _name_models(models, inputs)
    _check_options(options)
    check_room(ray, [task_demand("tasks that profile models", num_cpus, num_gpus)])
    task = ray.remote(profile_one).options(num_cpus=num_cpus, num_gpus=num_gpus, max_retries=MAX_RETRIES)
    threads = max(1, int(num_cpus))
    tasks = {
        task.remote(name, model, values, threads, num_gpus > 0, options): name
        for name, (model, values) in named.items()
    }
    with ExitStack() as stack:
        notify = progress or stack.enter_context(show_progress("profiling"))
        profiles = _collect(ray, tasks, notify)
    return Profiles(tuple(profiles[name] for name in named))


def _name_models(
    models: Iterable[str] | Mapping[str, tuple[nn.Module, Any]], inputs: Any
) -> dict[str, tuple[nn.Module | str, Any]]:
    """Return the models and their inputs by name."""
    if isinstance(models, str):
        raise BadQuery(f"expected several names of models, got {models!r}: put it in a list")
    if not isinstance(models, Mapping):
        is_several = isinstance(models, Iterable) and not isinstance(models, nn.Module)
        names: list[str] = list(models) if is_several else [models]  # type: ignore[list-item]  # refused below
        if wrong := [name for name in names if not isinstance(name, str)]:
            raise BadQuery(
                "expected names of models, such as 'torchvision:resnet50', or a dict of names and (module, inputs), "
                f"got {describe_value(wrong[0])}"
            )
        return {name: (name, inputs) for name in names}
    if inputs is not None:
        raise BadQuery("the inputs are in the mapping of models already: leave out `inputs`")
    for name, pair in models.items():
        if not (isinstance(name, str) and isinstance(pair, tuple | list) and len(pair) == 2):
            raise BadQuery(f"expected (module, inputs) for the model {name!r:.80}, got {describe_value(pair)}")
        if not isinstance(pair[0], str):
            check_model(pair[0])
    return {name: (model, values) for name, (model, values) in models.items()}


def _check_options(options: Mapping[str, Any]) -> None:
    """Raise if an option of `mt.profile` is unknown or invalid, which every task would find out."""
    if refused := [name for name in _REFUSED if name in options]:
        raise BadQuery(f"{refused[0]!r} is no option for many models: profile one with mt.profile")
    defaults = {
        name: option.default
        for name, option in signature(profile_model).parameters.items()
        if option.kind is option.KEYWORD_ONLY and name not in _REFUSED
    }
    check_names("mt.profile", options, list(defaults))
    values = {name: value for name, value in {**defaults, **options}.items() if name not in ("strict", "fake")}
    parse_options(**values, progress=None)


def _collect(ray: Any, tasks: dict[Any, str], notify: Progress) -> dict[str, ProfiledModel]:
    """Wait for all models; cancel the rest if interrupted."""
    profiles: dict[str, ProfiledModel] = {}
    pending = list(tasks)
    try:
        while pending:
            (done,), pending = ray.wait(pending, num_returns=1)
            name = tasks[done]
            profiles[name] = _result_of(ray, done, name)
            notify(name, len(profiles), len(tasks))
    except BaseException:
        for one in pending:
            ray.cancel(one)
        raise
    return profiles


def _result_of(ray: Any, task: Any, name: str) -> ProfiledModel:
    from ray.exceptions import RayError

    try:
        result: ProfiledModel = ray.get(task)
    except RayError as error:  # the worker was killed too often, or could not build or send the model
        result = ProfiledModel(name, None, failure_of(error))
    return result


def profile_one(
    name: str, model: nn.Module | str, inputs: Any, threads: int, on_gpu: bool, options: dict[str, Any]
) -> ProfiledModel:
    """Profile a model in a task; a failure is a result, too."""
    torch.set_num_threads(threads)
    node = platform.node()
    try:
        if isinstance(model, str):
            resolved = resolve(model, inputs=inputs).for_one_pass()
            model, inputs = resolved.model, resolved.inputs
        if on_gpu:
            model = model.to("cuda")
            inputs = Inputs.of(inputs, model).to("cuda")
        with torch.set_grad_enabled(bool(options.get("backward"))):
            result = profile_model(model, inputs, **options)
        if not isinstance(result, Profile):
            raise BadQuery(f"expected inputs of {name!r}, got none: pass (model, inputs)")
    except Exception as error:  # noqa: BLE001  one model must not end the others
        return ProfiledModel(name, None, failure_of(error), node)
    return ProfiledModel(name, result, None, node)


def failure_of(error: Exception) -> ProfileFailure:
    """Describe an error in one line."""
    return ProfileFailure(type(error).__name__, sanitize_text(describe_error(error).partition(": ")[2]))
