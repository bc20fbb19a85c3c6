"""Whether our own trainer and engines take a recipe that asks for them (nemo_fp8rl.workers=ours)."""

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from nemo_fp8rl.doctor.finding import Finding
from nemo_fp8rl.doctor.plan import Plan
from nemo_fp8rl.doctor.shapes import config_of
from nemo_fp8rl.errors import UserError

TOPIC = "workers"


def check_workers(plan: Plan) -> Iterator[Finding]:
    """By the functions that they are made by; these need torch."""
    ours = plan.values["nemo_fp8rl"]
    if ours["workers"] != "ours":
        return
    refusal = _refusal(plan)
    if refusal:
        yield Finding("error", TOPIC, refusal)
    if ours["align"] == "vllm":
        why = "nemo_fp8rl.align=vllm rounds as vLLM's CPU kernels do; on GPUs set nemo_fp8rl.align=none"
        yield Finding("error", TOPIC, why)
    elif not refusal:
        yield Finding("ok", TOPIC, "our own trainer and engines take this recipe")


def _refusal(plan: Plan) -> str:
    """The first; empty without one."""
    from nemo_fp8rl.nemo_rl.config import from_nemo_rl

    name = plan.policy["model_name"]
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config_of(name)))
        tokenizer = {**plan.policy["tokenizer"], "name": folder}
        policy = {**plan.policy, "model_name": folder, "tokenizer": tokenizer}
        try:
            from_nemo_rl({**plan.values, "policy": policy})
        except UserError as error:
            return str(error).replace(folder, name)
    return ""
