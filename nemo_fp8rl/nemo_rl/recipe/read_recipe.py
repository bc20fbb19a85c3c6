"""Read a recipe for NeMo RL without importing it; every key is checked, its own against the checkout, ours typed."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_fp8rl.algorithms.gates import check_gates
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.schema import Fp8RlConfig
from nemo_fp8rl.config.typed_tree import check_keys, check_numbers, defaults, shown, typed
from nemo_fp8rl.config.validate import check_no_secret, check_tracker
from nemo_fp8rl.config.yaml_tree import PATHS, expand_homes, read_with_parents, refusing, register_resolvers
from nemo_fp8rl.nemo_rl.recipe.checkout import NEMO_RL_SRC, Checkout, find_checkout, make_absolute
from nemo_fp8rl.nemo_rl.recipe.keys import at
from nemo_fp8rl.nemo_rl.recipe.known_keys import check_known, check_read, read_known_keys
from nemo_fp8rl.nemo_rl.recipe.overrides import adds, apply_override, key_of
from nemo_fp8rl.nemo_rl.recipe.precision import Precision, read_precision
from nemo_fp8rl.nemo_rl.recipe.value_types import check_values

BLOCK = "nemo_fp8rl"
SAID_BY_NEMO_RL = {
    "flow": "policy.megatron_cfg.fp8_cfg.enabled and policy.generation.vllm_cfg.precision",
    "scale_format": "policy.megatron_cfg.env_vars and policy.generation.vllm_cfg.pow2_weight_scaling_factors",
    "fp8_param": "policy.megatron_cfg.fp8_cfg.fp8_param",
}
"""Keys of ours that a recipe for NeMo RL says in its own."""


@dataclass(frozen=True)
class NemoRlRecipe:
    """values: the whole recipe, resolved; `???` where it leaves a value to the command line. checkout: NeMo RL's."""

    path: Path
    values: dict[str, Any]
    checkout: Checkout

    @property
    def precision(self) -> Precision:
        """Raises UserError where trainer and engine would not agree."""
        return read_precision(self.values.get("policy") or {})

    @property
    def fp8rl(self) -> Fp8RlConfig:
        """Our block, with what NeMo RL's keys say. Raises UserError as `precision` does."""
        precision = self.precision
        derived = {
            "flow": precision.flow,
            "scale_format": precision.scale_format,
            "fp8_param": precision.fp8_param,
        }
        return typed({**self.values[BLOCK], **derived}, Fp8RlConfig, f"{BLOCK}.")


def is_for_nemo_rl(path: Path) -> bool:
    """Whether it is in NeMo RL's dialect, which says how many GPUs a node has. Raises UserError without a recipe."""
    register_resolvers()
    return _is_for_nemo_rl(path, _read_tree(path))


def refuse_for_nemo_rl(path: Path, command: str) -> None:
    """Raise UserError for a recipe in NeMo RL's dialect, where its checkout is not there, too. command: who asks."""
    try:
        theirs = is_for_nemo_rl(path)
    except UserError as error:
        if NEMO_RL_SRC not in str(error):
            raise
        theirs = True
    if theirs:
        raise UserError(f"{path} is a recipe for NeMo RL, and {command} takes those of `nemo-fp8rl train`; see conf/")


def load(path: str | Path, overrides: Sequence[str] = ()) -> NemoRlRecipe:
    """The recipe with overrides in Hydra's grammar, checked: keys, our block, and that both sides' precisions agree.

    Raises UserError for anything wrong.
    """
    recipe = read(path, overrides)
    _ = recipe.precision
    return recipe


def read(path: str | Path, overrides: Sequence[str] = ()) -> NemoRlRecipe:
    """The same, whatever it says about precision."""
    from omegaconf import OmegaConf

    register_resolvers()
    tree = _read_tree(Path(path))
    if not _is_for_nemo_rl(Path(path), tree):
        raise UserError(
            f"{path} is no recipe for NeMo RL (it has no cluster.gpus_per_node, nor a parent that has); recipes of "
            "`nemo-fp8rl train` are checked when they run"
        )
    checkout = find_checkout()
    known = read_known_keys(checkout)
    for override in overrides:
        key = key_of(override)
        if not key.startswith(f"{BLOCK}."):
            check_known(_nested(key), known, checkout.version)
        if adds(tree, override):
            check_read(key, known)
        apply_override(tree, override)
    with refusing(str(path)):
        given: Any = OmegaConf.to_container(tree)
    ours = given.pop(BLOCK, None) or {}
    check_known(given, known, checkout.version)
    _check_keys_of_ours(ours)
    with refusing(str(path)):
        tree = OmegaConf.merge({BLOCK: defaults(Fp8RlConfig, ours)}, tree)
        values: Any = OmegaConf.to_container(tree, resolve=True)
    expand_homes(values, PATHS)
    check_numbers(values)
    check_values(values)
    _check_no_secrets(values)
    block = typed(values[BLOCK], Fp8RlConfig, f"{BLOCK}.")
    if block.correction is not None:
        block.correction.resolved()
    check_gates(block.gates)
    return NemoRlRecipe(Path(path), values, checkout)


def _read_tree(path: Path) -> Any:
    make_absolute()
    try:
        return read_with_parents(path)
    except UserError as error:
        if NEMO_RL_SRC in str(error) or os.environ.get(NEMO_RL_SRC, NEMO_RL_SRC) in str(error):
            find_checkout()  # a parent in the checkout, and it is the checkout that is missing
        raise


def _is_for_nemo_rl(path: Path, tree: Any) -> bool:
    """Removed or null on the command line, or of another type, is `check_values`'s."""
    from omegaconf import OmegaConf

    with refusing(f"{path}: cluster"):
        return OmegaConf.select(tree, "cluster.gpus_per_node") is not None


def _check_no_secrets(values: dict[str, Any]) -> None:
    """Raise UserError for secrets, as in recipes of ours: a script or a manifest would show them."""
    for key, variables in _variables(values):
        check_no_secret(key, variables)
    uri = at(values, "logger.mlflow.tracking_uri", None)
    check_tracker(None if uri is None else str(uri))


def _variables(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every `env_vars`: the trainer's, the engine's, those of further workers."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            key = f"{prefix}{name}"
            if name == "env_vars":
                yield key, value
            else:
                yield from _variables(value, f"{key}.")


def _nested(key: str) -> dict[str, Any]:
    """a.b as {a: {b: None}}."""
    first, _, rest = key.partition(".")
    return {first: _nested(rest) if rest else None}


def _check_keys_of_ours(ours: Any) -> None:
    if not isinstance(ours, dict):
        raise UserError(f"{BLOCK} must be a block of keys, got {shown(ours)}")
    for key, where in SAID_BY_NEMO_RL.items():
        if key in ours:
            raise UserError(f"{BLOCK}.{key} is said by {where} in a recipe for NeMo RL; remove it")
    check_keys(ours, Fp8RlConfig, f"{BLOCK}.")
