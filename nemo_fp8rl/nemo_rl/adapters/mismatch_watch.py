"""The alarm about a mismatch (`algorithms.gates`) in NeMo RL's loops.

The package's policy looks at every batch itself. NeMo RL's own workers report the metric to NeMo RL's logger alone,
whose `log_metrics` then looks at it.
"""

import sys
from collections.abc import Mapping
from typing import Any

from nemo_fp8rl.algorithms.gates import ALARM_METRIC, GateStop, alarm, explained_mismatch
from nemo_fp8rl.config.fp8rl_schema import Flow, Fp8RlConfig
from nemo_fp8rl.nemo_rl.recipe.keys import at


def print_alarm(sentence: str) -> None:
    """Print it, unless it is empty, in the log and where errors go."""
    for stream in (sys.stdout, sys.stderr) if sentence else ():
        print(f"nemo-fp8rl: {sentence}", file=stream, flush=True)


def watch_logger(
    logger: Any, values: Mapping[str, Any], choice: Fp8RlConfig, flow: Flow, asynchronous: bool, experts: bool
) -> None:
    """Look at each step that NeMo RL's logger gets; the recipe's `mismatch_alarm` decides what follows.

    values:        the recipe
    flow:          its precision
    asynchronous:  engines generate from older weights
    experts:       the model may be a mixture of experts
    """
    if choice.mismatch_alarm == "none":
        return
    explained = explained_mismatch(
        flow,
        fp8_cache=str(at(values, "policy.generation.vllm_cfg.kv_cache_dtype", "auto")).startswith("fp8"),
        experts=experts,
        temperature=float(at(values, "policy.generation.temperature", 1.0)),
        asynchronous=asynchronous,
    )
    log_metrics = logger.log_metrics

    def log_and_look(metrics: Mapping[str, Any], step: int, prefix: str | None = "", **options: Any) -> None:
        log_metrics(metrics, step, prefix, **options)
        if prefix == "train" and ALARM_METRIC in metrics:
            sentence = alarm({ALARM_METRIC: float(metrics[ALARM_METRIC])}, explained)
            if sentence and choice.mismatch_alarm == "stop":
                raise GateStop(f"step {step}: {sentence}")
            print_alarm(sentence and f"step {step}: {sentence}")

    logger.log_metrics = log_and_look
