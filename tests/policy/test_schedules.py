"""Learning rates of a schedule are those of the published formulas, and go on to the bit after a checkpoint."""

import math

import pytest
import torch

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.policy.optimizer.builders import build_scheduler
from tests.conftest import RECIPES

LR, MIN_LR, WARMUP, DECAY, WSD_DECAY = 2e-3, 2e-4, 4, 20, 6
KEYS = (f"optimizer.lr={LR}", f"optimizer.min_lr={MIN_LR}", f"scheduler.lr_warmup_iters={WARMUP}")
WSD = ("scheduler.lr_decay_style=WSD", f"scheduler.lr_wsd_decay_iters={WSD_DECAY}")


def recipe(*keys: str):
    keys = (*KEYS, f"scheduler.lr_decay_iters={DECAY}", *keys)
    return load(RECIPES / "tiny_cpu.yaml", [f"policy.megatron_cfg.{key}" for key in keys])


def rates(cfg, steps: int, after: int = 0) -> list[float]:
    """The learning rates of steps 1, 2, ...; the schedule is saved and loaded into a new one after some of them."""
    found = []
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
    schedule = build_scheduler(cfg.policy, optimizer)
    for step in range(1, steps + 1):
        schedule.step(increment=1)
        found.append(optimizer.param_groups[0]["lr"])
        if step == after:
            state = schedule.state_dict()
            optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
            schedule = build_scheduler(cfg.policy, optimizer)
            schedule.load_state_dict(state)
    return found


SHAPES = {
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
    "minus_sqrt": lambda x: 1 - math.sqrt(x),
    "exponential": lambda x: 2 * 0.5**x - 1,
}


@pytest.mark.parametrize("style", SHAPES)
def test_wsd_warms_up_stays_and_decays(style):
    """Warmup-stable-decay, arXiv 2404.06395; the shapes are those of arXiv 2405.18392 and of Megatron."""
    found = rates(recipe(*WSD, f"scheduler.lr_wsd_decay_style={style}"), DECAY + 2)
    up = [LR * step / WARMUP for step in range(1, WARMUP + 1)]
    stable = [LR] * (DECAY - WSD_DECAY - WARMUP)
    down = [MIN_LR + (LR - MIN_LR) * SHAPES[style](step / WSD_DECAY) for step in range(1, WSD_DECAY + 1)]
    assert found == pytest.approx([*up, *stable, *down, MIN_LR, MIN_LR])


def test_a_cosine_decays_from_the_warm_up_on():
    """arXiv 1608.03983, without restarts."""
    found = rates(recipe("scheduler.lr_decay_style=cosine"), DECAY + 1)
    shares = [min(1, (step - WARMUP) / (DECAY - WARMUP)) for step in range(WARMUP, DECAY + 2)]
    assert found[WARMUP - 1 :] == pytest.approx([MIN_LR + (LR - MIN_LR) * SHAPES["cosine"](x) for x in shares])


@pytest.mark.parametrize("after", [2, 10, 17])
def test_a_schedule_goes_on_to_the_bit(after):
    cfg = recipe(*WSD, "scheduler.lr_wsd_decay_style=minus_sqrt")
    assert rates(cfg, DECAY, after) == rates(cfg, DECAY)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (WSD[:1], r"lr_decay_style=WSD needs .*lr_wsd_decay_iters, the steps of its decay"),
        (
            (*WSD[:1], "scheduler.lr_wsd_decay_iters=17"),
            r"lr_wsd_decay_iters=17 and lr_warmup_iters=4 do not fit in .*=20",
        ),
        (WSD[1:], r"lr_wsd_decay_iters and .* are of the schedule WSD, and .*lr_decay_style is constant: remove them"),
        (("scheduler.lr_wsd_decay_style=linear",), r"are of the schedule WSD"),
    ],
)
def test_keys_of_wsd_that_contradict_each_other_are_refused(keys, message):
    with pytest.raises(UserError, match=message):
        recipe(*keys)
