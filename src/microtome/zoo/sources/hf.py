"""`hf:TYPE` and `hf:FOLDER`: models of transformers, built from a configuration with random weights.

Nothing is downloaded, and no code in a folder is run.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from microtome.errors import BadFile, BuildFailed, NoMatch, describe_error
from microtome.example_inputs import transformers_example
from microtome.files.reading import read_json
from microtome.zoo.packages import import_package, import_torchvision, is_installed
from microtome.zoo.sources.base import ModelSpec, no_such_model

PREFIX = "hf"


def names() -> list[str]:
    """List the model types with a base model, without a task head."""
    import_package("transformers")
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return sorted(MODEL_MAPPING_NAMES)


def find(name: str, args: dict[str, Any]) -> ModelSpec:
    transformers = import_package("transformers")
    if is_installed("torchvision"):
        import_torchvision()  # vision models import it
    with _offline():
        config = _make_config(transformers, name, args)
        model_class = _model_class(transformers, name, config)

    def build() -> Any:
        with _offline():
            return model_class._from_config(config)  # as AutoModel.from_config, but runs no code in a folder

    one_pass = {"use_cache": False} if _makes_cache(model_class, config) else {}
    return ModelSpec(build, transformers_example, has_random_weights=True, one_pass=one_pass, model_class=model_class)


def _makes_cache(model_class: Any, config: Any) -> bool:
    """Return whether the model returns a cache for the next token unless told not to."""
    is_encoder = not (getattr(config, "is_decoder", True) or getattr(config, "is_encoder_decoder", False))
    takes_flag = "use_cache" in inspect.signature(model_class.forward).parameters
    return takes_flag and not is_encoder and bool(getattr(config.get_text_config(), "use_cache", False))


@contextmanager
def _offline() -> Iterator[None]:
    """Keep transformers from accessing the network."""
    import huggingface_hub.constants as constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _make_config(transformers: ModuleType, name: str, args: dict[str, Any]) -> Any:
    """Return the configuration in a folder, or the default one of a model type, updated with the arguments."""
    if name in transformers.CONFIG_MAPPING:
        values: dict[str, Any] = {}
        config_class = transformers.CONFIG_MAPPING[name]
    else:
        values = _read_config(transformers, name)
        config_class = transformers.CONFIG_MAPPING[values["model_type"]]
    if "architectures" in args:
        args = args | {"architectures": _check_architectures(transformers, name, args["architectures"])}
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
        raise BuildFailed(f"cannot make the configuration of hf:{name}: {describe_error(error)}") from error


def _check_architectures(transformers: ModuleType, name: str, architectures: Any) -> list[str]:
    """Return the names of classes, of which there may be one without a list; raise if transformers lacks one."""
    classes = [architectures] if isinstance(architectures, str) else list(architectures or ())
    for one in classes:
        if not isinstance(one, str) or not hasattr(transformers, one):
            near = difflib.get_close_matches(str(one).strip("[]'\""), dir(transformers), n=3)
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            raise BuildFailed(f"hf:{name}: transformers has no class {one!r}.{hint}")
    return classes


def _read_config(transformers: ModuleType, folder: str) -> dict[str, Any]:
    if not Path(folder).is_dir():
        if Path(folder).exists() or Path(folder).is_absolute() or folder.startswith((".", "~")) or folder.endswith("/"):
            got = "got a file" if Path(folder).exists() else "there is none"
            raise NoMatch(f"hf:{folder}: expected a folder with the config.json of a model at {folder!r}, {got}")
        raise _no_such_model(folder)
    file = Path(folder) / "config.json"
    if not file.exists():
        raise NoMatch(f"the folder {folder} has no config.json")
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


def _no_such_model(name: str) -> NoMatch:
    """Return the error for a name that is neither a model type nor a folder; it may be one of the Hugging Face Hub."""
    types = names()
    repository = name.rpartition("/")[2].lower()
    is_misspelled = bool(difflib.get_close_matches(name, types, n=1, cutoff=0.85))
    near = max((kind for kind in types if repository.startswith((f"{kind}-", f"{kind}_"))), key=len, default=None)
    if is_misspelled or not (near or re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name)):
        reason = " It takes a model type or a folder with a config.json, and downloads nothing."
        return no_such_model("hf", name, types, reason)
    by_type = f"pass hf:{near}" if near else "pass its model type, such as hf:bert (see microtome models 'hf:*'),"
    return NoMatch(
        f"{name!r} looks like the name of a repository on the Hugging Face Hub, and microtome downloads nothing: "
        f"{by_type} for the default configuration with random weights; or download the repository (hf download {name} "
        "--local-dir FOLDER) and pass hf:FOLDER for its configuration, with --weights FOLDER/model.safetensors for its "
        "weights"
    )


def causal_class(model_class: type) -> str:
    """Return the name of the class with a head for the next token, of a model's type; "" if there is none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    config: Any = getattr(model_class, "config_class", None)
    name: str = CAUSAL.get(getattr(config, "model_type", ""), "")
    return name


def _model_class(transformers: ModuleType, name: str, config: Any) -> Any:
    """Return the class that the configuration names, or else the base model."""
    for architecture in getattr(config, "architectures", None) or ():
        if hasattr(transformers, architecture):
            return getattr(transformers, architecture)
    try:
        base = transformers.MODEL_MAPPING[type(config)]
    except KeyError as error:
        raise NoMatch(
            f"transformers has no base model for hf:{name}: name a class with --arg \"architectures=['…']\""
        ) from error
    except Exception as error:
        raise BuildFailed(f"cannot import the code of hf:{name}: {describe_error(error)}") from error
    return base[0] if isinstance(base, list | tuple) else base
