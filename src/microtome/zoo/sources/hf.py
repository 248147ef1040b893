"""`hf:TYPE` and `hf:FOLDER`: a model of transformers from its configuration, with random weights.

Nothing is ever downloaded, and no code of a folder is run.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from microtome.errors import BadFile, BuildFailed, NoMatch, describe_error
from microtome.files.reading import read_json
from microtome.zoo.packages import installed, need
from microtome.zoo.sources.hf_inputs import example
from microtome.zoo.sources.source import FoundModel, unknown
from microtome.zoo.torchvision_import import import_torchvision, operators_note

PACKAGE = "transformers"


def names() -> list[str]:
    """The model types that have a plain model, without a head."""
    need("transformers")
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return sorted(MODEL_MAPPING_NAMES)


def find(name: str, args: dict[str, Any]) -> FoundModel:
    transformers = _transformers()
    with _offline():
        config = _config(transformers, name, args)
        model_class = _model_class(transformers, name, config)

    def make() -> Any:
        with _offline():
            return model_class._from_config(config)  # as AutoModel.from_config does, which runs no code of a folder

    return FoundModel(make, example, operators_note())


def _transformers() -> ModuleType:
    transformers = need("transformers")
    if installed("torchvision"):
        import_torchvision()  # vision models import it
    return transformers


@contextmanager
def _offline() -> Iterator[None]:
    """Let no code of transformers reach the network."""
    import huggingface_hub.constants as constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _config(transformers: ModuleType, name: str, args: dict[str, Any]) -> Any:
    """The configuration of a folder, or the default one of a type, with the arguments in place of its own values."""
    if name in transformers.CONFIG_MAPPING:
        values: dict[str, Any] = {}
        config_class = transformers.CONFIG_MAPPING[name]
    else:
        values = _read(transformers, name)
        config_class = transformers.CONFIG_MAPPING[values["model_type"]]
    try:
        default = config_class.from_dict(values) if values else config_class()
        for key in args:
            if not hasattr(default, key):
                near = difflib.get_close_matches(key, default.to_dict(), n=3, cutoff=0.5)
                hint = f" Did you mean {' or '.join(near)}?" if near else ""
                raise BuildFailed(f"the configuration of hf:{name} has no {key!r}.{hint}")
        return config_class.from_dict(values | args) if values else config_class(**args)
    except BuildFailed:
        raise
    except Exception as error:
        raise BuildFailed(f"the configuration of hf:{name} cannot be made: {describe_error(error)}") from error


def _read(transformers: ModuleType, name: str) -> dict[str, Any]:
    """The config.json of a folder."""
    if not Path(name).is_dir():
        why = " It takes a model type or a folder with a config.json, and downloads nothing."
        raise unknown("hf", name, names(), why)
    file = Path(name) / "config.json"
    if not file.exists():
        raise NoMatch(f"the folder {name} has no config.json")
    try:
        values = read_json(file)
    except BadFile as error:
        raise BuildFailed(str(error)) from error
    kind = values.get("model_type") if isinstance(values, dict) else None
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        raise NoMatch(
            f"{file} has the model_type {kind!r}, which transformers {transformers.__version__} does not have; "
            "code that comes with a model is not run"
        )
    return dict(values)


def _model_class(transformers: ModuleType, name: str, config: Any) -> Any:
    """The class that the configuration names, or else the plain model without a head."""
    for word in getattr(config, "architectures", None) or ():
        if hasattr(transformers, word):
            return getattr(transformers, word)
    try:
        found = transformers.MODEL_MAPPING[type(config)]
    except KeyError as error:
        raise NoMatch(
            f"transformers has no plain model for hf:{name}: name its class with --arg \"architectures=['…']\""
        ) from error
    except Exception as error:
        raise BuildFailed(f"the code of hf:{name} cannot be imported: {describe_error(error)}") from error
    return found[0] if isinstance(found, list | tuple) else found
