"""`nemo-fp8rl nemo`: NeMo RL's own loop, from its own config, with our parts. Which parts is up to the machine:

without GPUs    our policy, engines, refit and loss (`install`)
with GPUs       NeMo RL's workers from its own `setup`, FP8 on the wire between them (`stock`), our loss
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from nemo_fp8rl.config import Config, Fp8RlConfig
from nemo_fp8rl.errors import UserError
from nemo_fp8rl.nemo_rl.compat import (
    PREPARE_PROCESS,
    finish_checkpoints,
    load_dataloader,
    prepare,
    save_state,
    steps_done,
)
from nemo_fp8rl.nemo_rl.recipe import NemoRlRecipe
from nemo_fp8rl.nemo_rl.recipe import load as checked
from nemo_fp8rl.nemo_rl.stop import LoopStop, Prompts
from nemo_fp8rl.workers import connect, require_token

OF_OUR_PARTS = ("align", "kv", "kernel", "refit", "gates")
"""Keys of `nemo_fp8rl` that are not of the loss or the precision."""
STOP_AT = "NEMO_FP8RL_STOP_AT"
"""When a run must have saved, in seconds since 1970: `launch slurm` says it to every attempt."""


@dataclass(frozen=True)
class Loop:
    """What NeMo RL's grpo_train is called with, but for the environments and tokenizer."""

    policy: Any
    generation: Any
    prompts: Any
    val_prompts: Any
    loss: Any
    logger: Any
    checkpointer: Any
    state: Any
    master: Any
    steps: int
    """Of the whole run."""


def run(path: Path, overrides: Sequence[str] = ()) -> bool:
    """Run grpo.max_num_steps, from the latest checkpoint in checkpointing.checkpoint_dir where there is one.

    Returns False when a signal, a pod that is to end, or checkpointing.checkpoint_must_save_by ended it before.
    """
    import torch

    recipe = checked(path, overrides)  # before anything is loaded
    on_gpus = torch.cuda.is_available()
    if not on_gpus:
        require_token()
    grpo = prepare()
    master = load(grpo, path, overrides)

    from nemo_rl.algorithms.utils import get_tokenizer, set_seed
    from nemo_rl.data.utils import setup_response_data
    from nemo_rl.models.generation import configure_generation_config
    from nemo_rl.utils.logger import get_next_experiment_dir

    from nemo_fp8rl.nemo_rl import environment

    tokenizer = get_tokenizer(master.policy["tokenizer"])
    master.policy["generation"] = configure_generation_config(master.policy["generation"], tokenizer)
    num_cpus = 0 if on_gpus else _checked_config(master).num_cpus + 2  # of ranks, engines, and two for environments
    master.logger["log_dir"] = get_next_experiment_dir(master.logger["log_dir"])
    set_seed(recipe.values["grpo"]["seed"])
    with ExitStack() as stack:
        stack.enter_context(_ray(num_cpus, on_gpus))
        environment.register()
        data, val_data, envs, val_envs = setup_response_data(tokenizer, master.data, master.env)
        parts = _of_nemo_rl(grpo, master, recipe, tokenizer, data, val_data) if on_gpus else None
        loop = stack.enter_context(parts or _of_ours(grpo, master, recipe, tokenizer, data, val_data))
        asynchronous = recipe.values["grpo"].get("async_grpo") or {}
        off_policy = bool(asynchronous.get("enabled"))
        stop = LoopStop(
            loop.master,
            steps=lambda: steps_done(loop.state),
            finish=lambda: finish_checkpoints(loop.checkpointer),
            asynchronous=off_policy,
        )
        prompts = loop.prompts if off_policy else Prompts(loop.prompts, stop)
        arguments = (
            *(loop.policy, loop.generation, prompts, loop.val_prompts, tokenizer, loop.loss, envs, val_envs),
            *(loop.logger, loop.checkpointer, loop.state, loop.master),
        )
        save_in_time(loop.master.checkpointing)
        begin, done = time.monotonic(), steps_done(loop.state)
        with stop.listening():
            if off_policy:
                grpo.async_grpo_train(*arguments, asynchronous["max_trajectory_age_steps"])
            else:
                grpo.grpo_train(*arguments)
        if stop.cut_short:
            return steps_done(loop.state) >= loop.steps
        return not _ran_out_of_time(loop, time.monotonic() - begin, done)


def _ran_out_of_time(loop: Loop, seconds: float, steps_before: int) -> bool:
    """Whether NeMo RL's loop, which does not say, ended since another step would have passed the time it has to save.

    It then saved, and what it saved is what its state says.
    """
    limit = loop.master.checkpointing.get("checkpoint_must_save_by")
    done = steps_done(loop.state)
    if limit is None or not loop.master.checkpointing["enabled"] or done >= loop.steps:
        return False
    return seconds * (1 + 1 / max(done - steps_before, 1)) >= seconds_of(limit)


def save_in_time(checkpointing: dict[str, Any]) -> None:
    """Set checkpoint_must_save_by, which counts from the loop's begin, to what is left of a job of `launch slurm`."""
    if STOP_AT in os.environ:
        left = int(os.environ[STOP_AT]) - time.time()
        chosen = shorter(checkpointing.get("checkpoint_must_save_by"), left)
        checkpointing["checkpoint_must_save_by"] = chosen
        print(f"nemo-fp8rl: checkpoint_must_save_by={chosen}, the job has {left:.0f} s until it stops", flush=True)


def shorter(limit: str | None, left: float) -> str:
    """Of a limit and of what is left, in seconds, as DD:HH:MM:SS."""
    rest = max(int(left), 0)
    if limit is not None:
        rest = min(rest, seconds_of(limit))
    return f"{rest // 86400:02d}:{rest // 3600 % 24:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"


def seconds_of(limit: str) -> int:
    """Of DD:HH:MM:SS."""
    days, hours, minutes, seconds = (int(part) for part in limit.split(":"))
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def load(grpo: ModuleType, path: Path, overrides: Sequence[str]) -> Any:
    """NeMo RL's MasterConfig by its own loader. Raises UserError for what it refuses."""
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
        return grpo.MasterConfig(**values)
    except (OverridesError, OmegaConfBaseException) as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}") from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{path}: {key}: {first['msg'][0].lower()}{first['msg'][1:]}") from None


@contextmanager
def _of_ours(
    grpo: ModuleType, master: Any, recipe: NemoRlRecipe, tokenizer: Any, data: Any, val_data: Any
) -> Iterator[Loop]:
    """What `nemo_rl.algorithms.grpo.setup` would make, with our trainer and engines in place of workers on GPUs."""
    from nemo_rl.utils.checkpoint import CheckpointManager
    from nemo_rl.utils.logger import Logger

    from nemo_fp8rl.nemo_rl.install import backends, install

    values = master.model_dump()  # its blocks are mappings in one version, objects in the other
    keys = values["grpo"]
    logger, checkpointer = Logger(master.logger), CheckpointManager(master.checkpointing)
    logger.log_hyperparams(values)
    latest = checkpointer.get_latest_checkpoint_path()
    state = save_state(grpo, checkpointer.load_training_info(latest))
    weights_path, _ = checkpointer.get_resume_paths(latest)
    asked = keys["num_prompts_per_step"] * (keys["batch_multiplier"] if keys["use_dynamic_sampling"] else 1)
    prompts = _dataloader(data, int(asked), shuffle=master.data["shuffle"], drop_last=True)
    if latest is not None:
        load_dataloader(prompts, Path(latest), master.data)
    steps = _steps(recipe, prompts)
    master.policy["megatron_cfg"]["train_iters"] = steps  # as NeMo RL's setup says it
    validates = keys["val_period"] > 0 or keys["val_at_start"] or keys["val_at_end"]
    val_prompts = _dataloader(val_data, keys["val_batch_size"]) if validates else None
    with backends(master, tokenizer, weights_path) as (policy, generation):
        loss = install(policy, generation, master, steps_done(state))
        if policy.cfg.fp8_kv_cache and latest is None:  # NeMo RL calibrates later than it validates
            first = [data[i] for i in range(keys["num_prompts_per_step"])]
            policy.calibrate_qkv_fp8_scales(_tokens(first, tokenizer.pad_token_id))
        yield Loop(policy, generation, prompts, val_prompts, loss, logger, checkpointer, state, master, steps)


@contextmanager
def _of_nemo_rl(
    grpo: ModuleType, master: Any, recipe: NemoRlRecipe, tokenizer: Any, data: Any, val_data: Any
) -> Iterator[Loop]:
    """NeMo RL's own setup of its own workers, FP8 on the wire between them where the recipe says FP8."""
    from transformers import AutoConfig

    from nemo_fp8rl.nemo_rl.loss import GrpoLossFn
    from nemo_fp8rl.nemo_rl.stock.choose import choose, policy_factory

    if recipe.checkout.version.startswith("0.7") and recipe.precision.flow != "bf16":
        raise UserError(
            f"NeMo RL {recipe.checkout.version} processes an engine's weights once more after a refit, which FP8 "
            "ones do not survive: use its main"
        )
    told = (name for name in OF_OUR_PARTS if getattr(recipe.fp8rl, name) != getattr(Fp8RlConfig(), name))
    for name in told:
        print(f"nemo-fp8rl: nemo_fp8rl.{name} is of our own trainer and refit, NeMo RL's do without it", flush=True)
    fused = bool(master.policy["megatron_cfg"].get("use_fused_linear_logprobs"))
    choose(master.policy, AutoConfig.from_pretrained(master.policy["model_name"]).num_hidden_layers)
    policy, generation, _, _, prompts, val_prompts, _, logger, checkpointer, state, master, *_ = grpo.setup(
        master, tokenizer, data, val_data, policy_factory=policy_factory
    )
    loss = GrpoLossFn(master.loss_fn, fused, recipe.fp8rl.correction)
    try:
        yield Loop(
            *(policy, generation, prompts, val_prompts, loss, logger, checkpointer, state, master),
            _steps(recipe, prompts),
        )
    finally:
        generation.shutdown()


def _checked_config(master: Any) -> Config:
    """What our parts will be made of. Raises UserError on a recipe that they cannot run."""
    from nemo_fp8rl.nemo_rl.config import from_nemo_rl

    if master.data["use_multiple_dataloader"]:
        raise UserError("data.use_multiple_dataloader=true is not supported without NeMo RL's setup; set it to false")
    return from_nemo_rl(master.model_dump())


@contextmanager
def _ray(num_cpus: int, on_gpus: bool) -> Iterator[None]:
    """A cluster to work in: NeMo RL's way on GPUs, else ours, which it then finds where others run, too."""
    if on_gpus:
        from nemo_rl.distributed.virtual_cluster import init_ray

        init_ray()
        yield
        return
    import ray

    connect(num_cpus, PREPARE_PROCESS)
    before = os.environ.get("RAY_ADDRESS")
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    try:
        yield
    finally:
        os.environ.pop("RAY_ADDRESS")
        if before is not None:
            os.environ["RAY_ADDRESS"] = before


def _steps(recipe: NemoRlRecipe, prompts: Any) -> int:
    """How many steps the loop takes: as asked for, or as its epochs have."""
    grpo = recipe.values["grpo"]
    if recipe.values["data"].get("use_multiple_dataloader"):  # which has no length
        return int(grpo["max_num_steps"])
    return int(min(grpo["max_num_steps"], grpo["max_num_epochs"] * len(prompts)))


def _dataloader(data: Any, batch_size: int, shuffle: bool = False, drop_last: bool = False) -> Any:
    from nemo_rl.data.collate_fn import rl_collate_fn
    from torchdata.stateful_dataloader import StatefulDataLoader

    if data is None:
        raise UserError("there is no validation data: give data.validation or data.train.split_validation_size")
    return StatefulDataLoader(data, batch_size, shuffle=shuffle, collate_fn=rl_collate_fn, drop_last=drop_last)


def _tokens(data: list[Any], pad_token_id: int) -> dict[str, Any]:
    """The prompts alone, padded, as NeMo RL's loop passes them to a calibration."""
    from nemo_rl.data.llm_message_utils import batched_message_log_to_flat_message

    logs = [datum["message_log"] for datum in data]
    flat, lengths = batched_message_log_to_flat_message(logs, pad_value_dict={"token_ids": pad_token_id})
    return {"input_ids": flat["token_ids"], "input_lengths": lengths}
