"""Run NeMo RL's single controller with this package's loss and, in FP8, its refit between NeMo RL's own workers.

NeMo RL's launcher is examples/run_grpo_single_controller.py: `setup_single_controller` builds workers, engines and
data on the driver, and an actor that gets them trains. In between, the loss and the synchronizer are replaced.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from nemo_rl.algorithms.single_controller import SingleControllerActor
from nemo_rl.algorithms.single_controller_utils import setup as controller_setup
from nemo_rl.algorithms.single_controller_utils.config import validate_single_controller_config
from ray.exceptions import RayError

from nemo_fp8rl.common.errors import UserError, single_line
from nemo_fp8rl.nemo_rl.adapters import environment
from nemo_fp8rl.nemo_rl.recipe.read_recipe import NemoRlRecipe
from nemo_fp8rl.nemo_rl.refit_transport.reporting import ReportingSynchronizer
from nemo_fp8rl.nemo_rl.refit_transport.settings import ENGINE
from nemo_fp8rl.nemo_rl.run.setup import prepare_nemo_rl_workers
from nemo_fp8rl.nemo_rl.stock.worker_choice import policy_factory

SHUTDOWN_SECONDS = 10
"""How long an environment may take to end. After an error of the run, the user must still see that error."""


def check_config(master: Any) -> None:
    """Raise UserError for what NeMo RL itself refuses about staleness, buffers and batch sizes; before Ray starts."""
    try:
        validate_single_controller_config(master)
    except ValueError as error:
        raise UserError(f"NeMo RL's single controller refuses this recipe: {single_line(error)}") from None


def run(master: Any, recipe: NemoRlRecipe, tokenizer: Any) -> bool:
    """Run grpo.max_num_steps steps, from the latest checkpoint if there is one.

    Returns False if checkpointing.checkpoint_must_save_by ended the run early.
    """
    loss, _ = prepare_nemo_rl_workers(master, recipe)
    print(
        "nemo-fp8rl: NeMo RL's single controller takes no stop signal: a run that a signal ends goes on from its last "
        "checkpoint; checkpointing.checkpoint_must_save_by makes it save in time",
        flush=True,
    )
    with _policies_stream_fp8():
        arguments, timings = controller_setup.setup_single_controller(master, tokenizer)
    arguments = with_parts_of_ours(arguments, loss)
    try:
        environment.check_data(master.data, arguments.dataloader.dataset, None)
        actor = SingleControllerActor.remote(master_config=master, actor_args=arguments, setup_timing_metrics=timings)
        steps = wait(actor, master.async_rl.stall_watchdog)["train_steps"]
    finally:
        for handle in arguments.env_handles.values():
            with suppress(RayError):
                ray.get(handle.shutdown.remote(), timeout=SHUTDOWN_SECONDS)
        for workers in (arguments.gen_handle, arguments.trainer_handle):
            with suppress(Exception):
                workers.shutdown()
    has_limit = master.checkpointing["enabled"] and master.checkpointing.get("checkpoint_must_save_by") is not None
    return not has_limit or steps >= master.grpo.max_num_steps


def with_parts_of_ours(arguments: Any, loss: Any) -> Any:
    """Return the actor's arguments with this loss and, where our checkpoint engine refits, a report of every refit."""
    synchronizer = arguments.weight_synchronizer
    if arguments.gen_handle.cfg.get("refit_transport") == ENGINE:
        synchronizer = PrintingSynchronizer(synchronizer, arguments.trainer_handle)
    return replace(arguments, loss_fn=loss, weight_synchronizer=synchronizer)


class PrintingSynchronizer(ReportingSynchronizer):
    """Prints the numbers of each refit, because the single controller drops what `sync_weights` returns."""

    def sync_weights(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        metrics = super().sync_weights(*args, **kwargs)
        print(f"nemo-fp8rl: refit {', '.join(f'{name}={value:.6g}' for name, value in metrics.items())}", flush=True)
        return metrics


def wait(actor: Any, watchdog: Any) -> dict[str, Any]:
    """Return what the actor's `run` returns.

    watchdog: the block async_rl.stall_watchdog
    Raises:   RuntimeError when the actor has not answered for stall_timeout_s; its own watchdog cannot see that
    """
    result, answered = actor.run.remote(), time.monotonic()
    while not ray.wait([result], timeout=watchdog.interval_s)[0]:
        with suppress(RayError):  # of an actor that has died, the result says why
            ray.get(actor.ping.remote(), timeout=watchdog.interval_s)
            answered = time.monotonic()
        if (silence := time.monotonic() - answered) > watchdog.stall_timeout_s:
            raise RuntimeError(f"NeMo RL's single controller has not answered for {silence:.0f} s")
    return dict(ray.get(result))


@contextmanager
def _policies_stream_fp8() -> Iterator[None]:
    """Build policies by `policy_factory` within the block.

    `setup_single_controller` takes no factory, unlike NeMo RL's `setup`: it reads the name TQPolicy in its module.
    """
    policy_class = controller_setup.TQPolicy
    controller_setup.TQPolicy = partial(policy_factory, policy_class=policy_class)
    try:
        yield
    finally:
        controller_setup.TQPolicy = policy_class
