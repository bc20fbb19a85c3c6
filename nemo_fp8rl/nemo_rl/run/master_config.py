"""NeMo RL's own config object of a recipe, MasterConfig, loaded by NeMo RL's own loader.

Its recipes name prompt files from the root of the checkout, where NeMo RL's scripts run. Such a path is replaced by the
file in the checkout, so that the command may run in any folder.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from nemo_fp8rl.common.errors import UserError, single_line
from nemo_fp8rl.config.recipe import PATHS
from nemo_fp8rl.config.yaml_tree import expand_homes
from nemo_fp8rl.nemo_rl.recipe.checkout import find_checkout
from nemo_fp8rl.nemo_rl.recipe.value_types import normalize

PROMPT_KEYS = ("prompt_file", "system_prompt_file")


def load_master_config(grpo: ModuleType, path: Path, overrides: Sequence[str]) -> Any:
    """Load NeMo RL's MasterConfig.

    grpo:    nemo_rl.algorithms.grpo, as `compat.prepare` returns it, or another module with a MasterConfig
    Raises: UserError for a recipe that NeMo RL refuses, and for a prompt file that does not exist
    """
    from nemo_rl.utils.config import (
        OverridesError,
        load_config,
        parse_hydra_overrides,
        register_omegaconf_resolvers,
    )
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from pydantic import ValidationError

    register_omegaconf_resolvers()
    try:
        config = load_config(path)
        if overrides:
            config = parse_hydra_overrides(config, list(overrides))
        values: Any = OmegaConf.to_container(config, resolve=True)
        expand_homes(values, PATHS)  # as `read_recipe` does
        _find_prompt_files(values["data"], find_checkout().root.absolute())
        return grpo.MasterConfig(**normalize(values))
    except (OverridesError, OmegaConfBaseException) as error:
        raise UserError(f"{path}: {single_line(error)}") from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{path}: {key}: {first['msg'][0].lower()}{first['msg'][1:]}") from None


def _find_prompt_files(data: dict[str, Any], checkout: Path) -> None:
    """Replace, in the block `data`, relative paths that exist in the checkout but not in the working directory."""
    for name, block in _dataset_blocks(data):
        for key in PROMPT_KEYS:
            if not (path := block.get(key)) or Path(path).is_file():
                continue
            if not (checkout / path).is_file():
                raise UserError(
                    f"data.{name}.{key}={path}: no such file, neither in the working directory nor in {checkout}"
                )
            block[key] = str(checkout / path)
            print(f"nemo-fp8rl: data.{name}.{key}={path} is taken from the checkout in NEMO_RL_SRC", flush=True)


def _dataset_blocks(data: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, block) of the common keys of all data sets, and of each data set, in a list or not."""
    for name in ("default", "train", "validation"):
        value = data.get(name)
        for index, block in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(block, dict):
                yield (f"{name}[{index}]" if isinstance(value, list) else name), block
