"""`nemo-fp8rl nemo`: run NeMo RL's own loop from its own config, with either kind of workers (`setup`)."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.data.tokenizer import tokenizer_errors
from nemo_fp8rl.generation.engine_checks import check_for_driver
from nemo_fp8rl.hf.hub import checkpoint_folder
from nemo_fp8rl.hf.model_config import read_hf_config
from nemo_fp8rl.nemo_rl.compat import PREPARE_PROCESS, completed_steps, finish_checkpoints, prepare
from nemo_fp8rl.nemo_rl.interface_check import check_interface
from nemo_fp8rl.nemo_rl.recipe.checkout import NEMO_RL_SRC
from nemo_fp8rl.nemo_rl.recipe.config_from_recipe import convert_recipe
from nemo_fp8rl.nemo_rl.recipe.gpu_division import is_asynchronous, is_single_controller
from nemo_fp8rl.nemo_rl.recipe.keys import at
from nemo_fp8rl.nemo_rl.recipe.read_recipe import NemoRlRecipe, load_recipe
from nemo_fp8rl.nemo_rl.recipe.recipe_checks import NEEDS_NEMO_RLS, check_loop
from nemo_fp8rl.nemo_rl.recipe.rewards import check_rewards
from nemo_fp8rl.nemo_rl.run.async_loop_watch import Watch
from nemo_fp8rl.nemo_rl.run.loop_stop import LoopStop, StoppableDataloader
from nemo_fp8rl.nemo_rl.run.master_config import load_master_config
from nemo_fp8rl.nemo_rl.run.setup import (
    LoopArguments,
    check_cluster,
    check_local_gpu,
    set_up_nemo_rl_workers,
    set_up_package_workers,
    uses_package_workers,
)
from nemo_fp8rl.nemo_rl.stock.pythonpath import package_on_pythonpath
from nemo_fp8rl.nemo_rl.stock.stock_limits import check_stock
from nemo_fp8rl.workers import (
    check_address,
    connect,
    find_cluster,
    joins_cluster,
    require_token,
    shorten_folder,
)
from nemo_fp8rl.workers.vllm_sockets import shorten_default

STOP_AT = "NEMO_FP8RL_STOP_AT"
"""Variable: the time by which a run must have saved, in seconds since 1970. `launch slurm` sets it per attempt."""
MAX_AGE = "grpo.async_grpo.max_trajectory_age_steps"


def run(path: Path, overrides: Sequence[str] = ()) -> bool:
    """Run grpo.max_num_steps steps, from the latest checkpoint in checkpointing.checkpoint_dir if there is one.

    Returns False if a signal, the end of a pod, or checkpointing.checkpoint_must_save_by ended the run early.
    """
    recipe = load_recipe(path, overrides)  # before anything is loaded
    check_loop(recipe.values)
    check_rewards(recipe.values["data"])
    if find_cluster():
        print(f"nemo-fp8rl: joining this machine's Ray cluster, RAY_ADDRESS={os.environ['RAY_ADDRESS']}", flush=True)
    uses_package = uses_package_workers(recipe.fp8rl.workers, recipe.precision.flow)
    print(
        f"nemo-fp8rl: trainer and engines are {'this package' if uses_package else 'NeMo RL'}'s "
        f"(nemo_fp8rl.workers={recipe.fp8rl.workers})",
        flush=True,
    )
    controlled = is_single_controller(recipe.values)
    if controlled and uses_package:
        raise UserError(NEEDS_NEMO_RLS)
    check_local_gpu(recipe.precision.flow)
    if uses_package:
        require_token()
    else:
        check_stock(recipe.values, recipe.checkout.engines_survive_fp8_refit)
    check_interface(recipe.checkout, uses_package, controlled)
    grpo = prepare()
    if controlled:
        from nemo_rl.algorithms import single_controller_utils

        from nemo_fp8rl.nemo_rl.run import single_controller

        master = load_master_config(single_controller_utils, path, overrides)
        single_controller.check_config(master)
    else:
        master = load_master_config(grpo, path, overrides)

    from nemo_rl.algorithms.utils import get_tokenizer, set_seed
    from nemo_rl.data.utils import setup_response_data
    from nemo_rl.models.generation import configure_generation_config
    from nemo_rl.utils.logger import get_next_experiment_dir

    from nemo_fp8rl.nemo_rl.adapters import environment

    tokenizer_cfg = _with_local_folder(master.policy["tokenizer"]) if uses_package else master.policy["tokenizer"]
    with tokenizer_errors(tokenizer_cfg["name"]):
        tokenizer = get_tokenizer(tokenizer_cfg)
    master.policy["generation"] = configure_generation_config(
        master.policy["generation"],
        tokenizer,
        has_refit_draft_weights=bool(at(master.policy, "draft.enabled", False)),
        trains_mtp=bool(at(master.policy, "megatron_cfg.mtp_num_layers", None)),
    )
    processes = 0
    if uses_package:
        cfg = convert_recipe(master.model_dump())
        check_for_driver(read_hf_config(cfg.policy.model_name), cfg)
        processes = cfg.num_cpus
    master.logger["log_dir"] = get_next_experiment_dir(master.logger["log_dir"])
    set_seed(recipe.values["grpo"]["seed"])
    with ExitStack() as stack:
        # Two more CPUs for environments. The log shows the errors of a collector, which goes on after them.
        stack.enter_context(_ray(processes + 2, uses_package, log_to_driver=is_asynchronous(recipe.values)))
        check_cluster(recipe.precision.flow)
        environment.register(uses_package, master)
        if controlled:
            limit_time(master.checkpointing)
            with reward_errors():
                return single_controller.run(master, recipe, tokenizer)
        data, val_data, envs, val_envs = setup_response_data(tokenizer, master.data, master.env)
        environment.check_data(master.data, data, val_data)
        set_up = set_up_package_workers if uses_package else set_up_nemo_rl_workers
        loop = stack.enter_context(set_up(grpo, master, recipe, tokenizer, data, val_data))
        return _run_loop(grpo, loop, recipe, tokenizer, envs, val_envs)


def _run_loop(
    grpo: ModuleType, loop: LoopArguments, recipe: NemoRlRecipe, tokenizer: Any, envs: Any, val_envs: Any
) -> bool:
    """Run NeMo RL's loop with these arguments; returns what `run` does."""
    off_policy = is_asynchronous(recipe.values)
    stop = LoopStop(
        loop.master,
        steps=lambda: completed_steps(loop.state),
        finish=lambda: finish_checkpoints(loop.checkpointer),
        asynchronous=off_policy,
    )
    prompts = loop.prompts if off_policy else StoppableDataloader(loop.prompts, stop)
    arguments = (
        *(loop.policy, loop.generation, prompts, loop.val_prompts, tokenizer, loop.loss, envs, val_envs),
        *(loop.logger, loop.checkpointer, loop.state, loop.master),
    )
    limit_time(loop.master.checkpointing)
    begin, done = time.monotonic(), completed_steps(loop.state)
    with stop.listen(), reward_errors():
        if off_policy:
            watch = Watch(loop.policy, getattr(loop.generation, "weight_synchronizer", None))
            grpo.async_grpo_train(*arguments, at(loop.master.model_dump(), MAX_AGE, 1))
        else:
            grpo.grpo_train(*arguments)
    if stop.cut_short:
        return completed_steps(loop.state) >= loop.steps
    out_of_time = _ran_out_of_time(loop, time.monotonic() - begin, done)
    if off_policy:
        by_validation = recipe.values["grpo"].get("stop_at_validation_threshold") is not None
        watch.check(0 if out_of_time or by_validation else loop.steps - done)
    return not out_of_time


@contextmanager
def reward_errors() -> Iterator[None]:
    """Raise a UserError of an environment's actor without the traceback that Ray puts around it."""
    from ray.exceptions import RayTaskError

    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, UserError):
            raise UserError(str(error.cause)) from None
        raise


def _ran_out_of_time(loop: LoopArguments, seconds: float, steps_before: int) -> bool:
    """Return whether NeMo RL's loop ended because another step would have passed its time to save.

    The loop does not report this. It has then saved, and its state counts the saved steps.
    """
    limit = loop.master.checkpointing.get("checkpoint_must_save_by")
    done = completed_steps(loop.state)
    if limit is None or not loop.master.checkpointing["enabled"] or done >= loop.steps:
        return False
    return seconds * (1 + 1 / max(done - steps_before, 1)) >= parse_seconds(limit)


def _with_local_folder(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """Return the block policy.tokenizer with the local folder of the tokenizer that it names."""
    return {**tokenizer, "name": str(checkpoint_folder(tokenizer["name"], "policy.tokenizer.name"))}


def limit_time(checkpointing: dict[str, Any]) -> None:
    """Set checkpoint_must_save_by to the remaining time of a job of `launch slurm`; it counts from the loop's start.

    Without checkpoints the key stays as it is: the loop would end early and nothing would show that it did.
    """
    if STOP_AT in os.environ and checkpointing.get("enabled", True):
        remaining = int(os.environ[STOP_AT]) - time.time()
        limit = shorten_limit(checkpointing.get("checkpoint_must_save_by"), remaining)
        checkpointing["checkpoint_must_save_by"] = limit
        print(f"nemo-fp8rl: checkpoint_must_save_by={limit}, the job has {remaining:.0f} s until it stops", flush=True)


def shorten_limit(limit: str | None, seconds: float) -> str:
    """Return the shorter of a limit, DD:HH:MM:SS, and a number of seconds, as DD:HH:MM:SS."""
    rest = max(int(seconds), 0)
    if limit is not None:
        rest = min(rest, parse_seconds(limit))
    return f"{rest // 86400:02d}:{rest // 3600 % 24:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"


def parse_seconds(limit: str) -> int:
    """Return the seconds of a limit, DD:HH:MM:SS."""
    days, hours, minutes, seconds = (int(part) for part in limit.split(":"))
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


@contextmanager
def _ray(num_cpus: int, uses_package: bool, log_to_driver: bool = False) -> Iterator[None]:
    """Start or join a Ray cluster: by NeMo RL's own function for its workers, else by the package's.

    In the second case RAY_ADDRESS names the cluster, so that NeMo RL finds it even if other clusters run here.
    """
    if not uses_package:
        from nemo_rl.distributed.virtual_cluster import init_ray

        check_address()
        shorten_default()
        if not joins_cluster():
            shorten_folder()
        with package_on_pythonpath():
            init_ray()
            yield
        return
    import ray

    connect(num_cpus, PREPARE_PROCESS, {NEMO_RL_SRC: os.environ[NEMO_RL_SRC]}, log_to_driver)
    before = os.environ.get("RAY_ADDRESS")
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    try:
        yield
    finally:
        os.environ.pop("RAY_ADDRESS")
        if before is not None:
            os.environ["RAY_ADDRESS"] = before
