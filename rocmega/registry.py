"""Which family runs which model: from the `model_type` of a config.json to a folder in models/."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

from rocmega.errors import ConfigError, RequestError

FAMILIES = {
    "glm_moe_dsa": "rocmega.models.glm",
    "deepseek_v4": "rocmega.models.deepseek",
    "deepseek_v41": "rocmega.models.deepseek",
}


def read_config(directory: str | Path) -> dict[str, Any]:
    """A checkpoint directory's config.json; ConfigError if there is none to read."""
    path = Path(directory) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): give the folder of a checkpoint.") from None
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is not a JSON object: it is damaged. Fetch it again.")
    return config


def family_package(model_type: object) -> str:
    """The package of a model type, such as "rocmega.models.glm"; ConfigError if nobody runs it."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ConfigError(f"model_type {model_type!r} in config.json is not supported; known types: {known}.")
    return FAMILIES[model_type]


def family_module(model_type: object, name: str) -> Any:
    """One module of a family, such as "config", "weights" or "standard".

    Raises ConfigError if the family does not have it: "mega" and "kernel" where there is no mega-task.
    """
    module = f"{family_package(model_type)}.{name}"
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ConfigError(f"There is no {name} for models of type {model_type!r} yet.") from None


def preset_names() -> list[str]:
    """Every model that a family knows by name."""
    return [name for package in dict.fromkeys(FAMILIES.values()) for name in _presets(package).PRESETS]


def presets_of(name: str) -> Any:
    """The presets module of the family that knows a model by name; RequestError if none does."""
    for package in dict.fromkeys(FAMILIES.values()):
        if name in _presets(package).PRESETS:
            return _presets(package)
    raise RequestError(f"there is no preset {name!r}; known presets: {', '.join(preset_names())}.")


def _presets(package: str) -> Any:
    return import_module(f"{package}.presets")


def load_config(directory: str | Path) -> Any:
    """The family's configuration object for a checkpoint directory, or ConfigError with every reason."""
    config = read_config(directory)
    return family_module(config.get("model_type"), "config").from_dict(config)
