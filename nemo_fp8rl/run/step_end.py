"""The end of a step, which all loops share: its checkpoint, its line on the display, and whether the run goes on."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from nemo_fp8rl.common.display import Display
from nemo_fp8rl.common.errors import StepRefused
from nemo_fp8rl.policy.interface import Policy
from nemo_fp8rl.run.directory import RunDirectory
from nemo_fp8rl.run.stop_flag import StopFlag


@contextmanager
def save_if_refused(run: RunDirectory, policy: Policy, step: int) -> Iterator[None]:
    """Save the steps before this one where the block refuses the step without having moved a weight.

    Raises: StepRefused, with the step
    """
    updates = policy.updates()
    try:
        yield
    except StepRefused as refused:
        if run.cfg.checkpointing.enabled and run.completed_steps < step - 1 and policy.updates() == updates:
            run.save_checkpoint(step - 1, policy)
        raise type(refused)(f"step {step}: {refused}") from None


def end_step(
    run: RunDirectory,
    policy: Policy,
    display: Display,
    stop: StopFlag,
    step: int,
    figures: Mapping[str, str],
    resume_hint: str,
) -> bool:
    """Save a logged step where a checkpoint is due, and show it; return False when the run is to stop before its end.

    figures:      what the display shows of the step
    resume_hint:  the option or command that continues a stopped run
    """
    must_stop, checkpointing = stop.is_set, run.cfg.checkpointing
    is_final = step == run.last_step or must_stop
    if checkpointing.enabled and (is_final or step % checkpointing.save_period == 0):
        display.show_phase("checkpoint")
        run.save_checkpoint(step, policy)
    display.show_step(step, dict(figures))
    if not must_stop or step == run.last_step:
        return True
    saved = run.completed_steps
    hint = f"checkpoint of step {saved}: {resume_hint} continues it" if saved else "no checkpoint"
    display.say(f"stopped after step {step}, {hint}")
    return False
