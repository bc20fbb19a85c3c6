"""The shape of a model, from its config.json or from the table of known models."""

import difflib
from pathlib import Path
from typing import Any

from nemo_fp8rl.commands.doctor.known_models import KNOWN_MODELS
from nemo_fp8rl.commands.doctor.models.read_config import from_config
from nemo_fp8rl.commands.doctor.models.shape import Shape
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.hf.hub import cached_file
from nemo_fp8rl.hf.model_config import read_json


def shape_of(model_name: str, config_file: Path | None = None) -> Shape:
    """Return the shape of a model. Raises UserError as `config_of` and `from_config` do."""
    return from_config(config_of(model_name, config_file), str(config_file or model_name))


def config_of(model_name: str, config_file: Path | None = None) -> dict[str, Any]:
    """Return the config.json of a model; the network is not used.

    model_name:   a folder, or `owner/model` or `owner/model@revision`, whose config.json is taken from the hub's cache,
        else from KNOWN_MODELS
    config_file:  the config.json to take instead, or its folder
    Raises: UserError if there is no such file, or if the model is neither in the cache nor known
    """
    if config_file is not None:
        path = config_file / "config.json" if config_file.is_dir() else config_file
        if (raw := read_json(path)) is None:
            raise UserError(f"--model-config: there is no file {path}; give the config.json of {model_name}")
        return raw
    cached = cached_file(model_name, "config.json")
    if cached is not None and cached.is_file() and (raw := read_json(cached)) is not None:
        return raw
    repository = model_name.partition("@")[0]
    if repository in KNOWN_MODELS:
        return KNOWN_MODELS[repository]
    similar = _most_similar(repository)
    raise UserError(
        f"policy.model_name={model_name} is no folder with a config.json, nor a model whose sizes the doctor knows"
        f"{f' (did you mean {similar}?)' if similar else ''}; give its config.json: --model-config FILE"
    )


def _most_similar(repository: str) -> str | None:
    """Return a known model whose name without the owner is nearly the same."""
    by_name = {known.rpartition("/")[2].lower(): known for known in KNOWN_MODELS}
    names = difflib.get_close_matches(repository.rpartition("/")[2].lower(), by_name, 1, cutoff=0.9)
    return by_name[names[0]] if names else None
