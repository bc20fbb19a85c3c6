"""Read and check a NeMo RL recipe without importing NeMo RL.

NeMo RL's keys are checked against its checkout (`known_keys`), the block nemo_fp8rl against `Fp8RlConfig`.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_fp8rl.algorithms.gates import check_gates
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.common.field_rules import NemoRl, fields_of
from nemo_fp8rl.config.fp8rl_schema import Fp8RlConfig
from nemo_fp8rl.config.recipe import PATHS
from nemo_fp8rl.config.recipe_names import check_command, find_recipe
from nemo_fp8rl.config.typed_tree import check_keys, check_numbers, defaults, short_repr, to_block
from nemo_fp8rl.config.validate.recipe import check_no_secret, check_tracker
from nemo_fp8rl.config.yaml_tree import expand_homes, read_with_parents, register_resolvers, yaml_errors_as_user_error
from nemo_fp8rl.nemo_rl.recipe.checkout import NEMO_RL_SRC, Checkout, find_checkout, make_absolute
from nemo_fp8rl.nemo_rl.recipe.keys import at
from nemo_fp8rl.nemo_rl.recipe.known_keys import check_key_is_read, check_known, read_known_keys
from nemo_fp8rl.nemo_rl.recipe.overrides import adds_key, apply_override, parse_key
from nemo_fp8rl.nemo_rl.recipe.precision import (
    BACKWARD_VARIABLE,
    ENV_VARS,
    FP4_CFG,
    FP4_SWITCHES,
    LINES_KEY,
    Precision,
    read_precision,
)
from nemo_fp8rl.nemo_rl.recipe.value_types import check_values, normalize

BLOCK = "nemo_fp8rl"
OTHER_ALGORITHMS = ("sft", "dpo", "rm", "ppo", "distillation")
"""Blocks of NeMo RL's recipes for other algorithms, which have no block grpo."""
DATA_BLOCKS = ("data", "env", "logger", "checkpointing")
"""Blocks of paths and of where results go."""
VARIABLE = re.compile(r"\$\{oc\.env:\s*(\w+)\s*\}")
FOLDER = "nemo_rl"
"""The folder of the shipped recipes for NeMo RL."""
DERIVED_KEYS = {field.name: field.marker(NemoRl).spelling for field in fields_of(Fp8RlConfig) if field.marker(NemoRl)}
"""Keys of the block nemo_fp8rl that are derived from NeMo RL's keys, and those keys."""


@dataclass(frozen=True)
class NemoRlRecipe:
    """A checked recipe.

    values:    the whole recipe with resolved interpolations; `???` marks a value left to the command line
    checkout:  the NeMo RL that it was checked against
    """

    path: Path
    values: dict[str, Any]
    checkout: Checkout

    @property
    def precision(self) -> Precision:
        """Precision of the run. Raises: UserError if trainer and engine do not agree."""
        return read_precision(self.values.get("policy") or {})

    @property
    def fp8rl(self) -> Fp8RlConfig:
        """The block nemo_fp8rl with the keys derived from NeMo RL's. Raises: UserError as `precision` does."""
        return to_block(self.precision.complete(self.values[BLOCK]), Fp8RlConfig, f"{BLOCK}.")


def is_for_nemo_rl(path: Path) -> bool:
    """Return whether a recipe is written for NeMo RL: these say how many GPUs a node has.

    Raises: UserError if there is no recipe
    """
    register_resolvers()
    path = find_recipe(path)
    return _is_for_nemo_rl(path, _read_tree(path))


def refuse_for_nemo_rl(path: Path, command: str) -> None:
    """Raise UserError for a recipe written for NeMo RL, also if its checkout is missing.

    command: the command that takes no such recipe
    """
    try:
        for_nemo_rl = is_for_nemo_rl(path)
    except UserError as error:
        if NEMO_RL_SRC not in str(error):
            raise
        for_nemo_rl = True
    if for_nemo_rl:
        raise UserError(
            f"{path} is a recipe for NeMo RL, and {command} takes those of `nemo-fp8rl train`, which "
            "`nemo-fp8rl recipes` lists"
        )


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> NemoRlRecipe:
    """Read a recipe with overrides in Hydra's grammar, and check its keys, the block nemo_fp8rl and the precision.

    Raises: UserError for anything wrong
    """
    recipe = read_recipe(path, overrides)
    _ = recipe.precision
    return recipe


def read_recipe(path: str | Path, overrides: Sequence[str] = (), needs_data: bool = True) -> NemoRlRecipe:
    """Do the same as `load_recipe` without the check that the precisions of trainer and engine agree.

    needs_data: False for a command that reads no data: an environment variable that is not set then stands as its name
                in the paths of the blocks DATA_BLOCKS
    """
    from omegaconf import OmegaConf

    register_resolvers()
    path = find_recipe(path, FOLDER)
    tree = _read_tree(path)
    if not _is_for_nemo_rl(path, tree):
        check_command(path, tree, "nemo")
        raise UserError(
            f"{path} is no recipe for NeMo RL (it has no cluster.gpus_per_node, nor a parent that has); recipes of "
            "`nemo-fp8rl train` are checked when that command runs"
        )
    if other := next((name for name in OTHER_ALGORITHMS if name in tree and "grpo" not in tree), None):
        raise UserError(f"{path} is a recipe for NeMo RL's {other.upper()}, and this package runs its GRPO")
    checkout = find_checkout()
    known = read_known_keys(checkout)
    for override in overrides:
        key = parse_key(override)
        if not key.startswith(f"{BLOCK}."):
            check_known(_nest(key), known, checkout.version)
        if adds_key(tree, override):
            check_key_is_read(key, known)
        apply_override(tree, override)
    with yaml_errors_as_user_error(str(path)):
        nemo_rl_keys: Any = OmegaConf.to_container(tree)
    package_keys = nemo_rl_keys.pop(BLOCK, None) or {}
    check_known(nemo_rl_keys, known, checkout.version)
    _check_package_keys(package_keys)
    if not needs_data:
        for name in (name for name in DATA_BLOCKS if name in nemo_rl_keys):
            tree[name] = _name_unset_variables(nemo_rl_keys[name])
    with yaml_errors_as_user_error(str(path)):
        tree = OmegaConf.merge({BLOCK: defaults(Fp8RlConfig, package_keys)}, tree)
        values: Any = OmegaConf.to_container(tree, resolve=True)
    expand_homes(values, PATHS)
    check_numbers(values)
    check_values(values)
    values = normalize(values)
    _check_no_secrets(values)
    _check_stated_once(package_keys, values)
    block = to_block(values[BLOCK], Fp8RlConfig, f"{BLOCK}.")
    if block.correction is not None:
        block.correction.resolve()
    check_gates(block.gates, block.sharpness.period)
    return NemoRlRecipe(path, values, checkout)


def _name_unset_variables(value: Any) -> Any:
    """Return the value with ${oc.env:NAME} as $NAME, in any depth, where the environment has no such variable."""
    if isinstance(value, dict):
        return {key: _name_unset_variables(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_name_unset_variables(inner) for inner in value]
    if not isinstance(value, str):
        return value
    return VARIABLE.sub(lambda match: match[0] if match[1] in os.environ else f"${match[1]}", value)


def _read_tree(path: Path) -> Any:
    make_absolute()
    try:
        return read_with_parents(path)
    except UserError as error:
        if NEMO_RL_SRC in str(error) or os.environ.get(NEMO_RL_SRC, NEMO_RL_SRC) in str(error):
            find_checkout()  # a parent cannot be read because the checkout is missing: say that instead
        raise


def _is_for_nemo_rl(path: Path, tree: Any) -> bool:
    # A key that the command line removes or sets to null is left to `check_values`.
    from omegaconf import OmegaConf

    with yaml_errors_as_user_error(f"{path}: cluster"):
        return OmegaConf.select(tree, "cluster.gpus_per_node") is not None


def _check_no_secrets(values: dict[str, Any]) -> None:
    """Raise UserError for a secret: a job's script or manifest would show it."""
    for key, variables in _variables(values):
        check_no_secret(key, variables)
    uri = at(values, "logger.mlflow.tracking_uri", None)
    check_tracker(None if uri is None else str(uri))


def _variables(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield every block `env_vars` with its key: the trainer's, the engine's, those of further workers."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            key = f"{prefix}{name}"
            if name == "env_vars":
                yield key, value
            else:
                yield from _variables(value, f"{key}.")


def _nest(key: str) -> dict[str, Any]:
    """Return {a: {b: None}} for a.b."""
    first, _, rest = key.partition(".")
    return {first: _nest(rest) if rest else None}


def _check_stated_once(package_keys: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Refuse a key of the package's where a variable of Transformer Engine says the same or something else."""
    variables = at(values, ENV_VARS, None) or {}
    if "weight_block" in package_keys and at(values, f"{FP4_CFG}.enabled", False):
        raise UserError(f"{BLOCK}.weight_block follows from {LINES_KEY} in a recipe with {FP4_CFG}; remove it")
    keys = ("backward", "fp4.hadamard", "fp4.stochastic_rounding")
    for key, variable in zip(keys, (BACKWARD_VARIABLE, *FP4_SWITCHES), strict=True):
        if at(package_keys, key, None) is not None and variable in variables:
            raise UserError(f"{BLOCK}.{key} and {ENV_VARS}.{variable} say the same: remove one of them")


def _check_package_keys(block: Any) -> None:
    if not isinstance(block, dict):
        raise UserError(f"{BLOCK} must be a block of keys, got {short_repr(block)}")
    for key, sources in DERIVED_KEYS.items():
        if key in block:
            raise UserError(f"{BLOCK}.{key} follows from {sources} in a recipe for NeMo RL; remove it")
    check_keys(block, Fp8RlConfig, f"{BLOCK}.")
