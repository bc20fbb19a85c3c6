"""Whether our own trainer and engines take a recipe that asks for them (nemo_fp8rl.workers=ours)."""

from collections.abc import Iterator

from nemo_fp8rl.doctor.finding import Finding
from nemo_fp8rl.doctor.plan import Plan
from nemo_fp8rl.errors import UserError
from nemo_fp8rl.nemo_rl.keys import check_keys

TOPIC = "workers"


def check_workers(plan: Plan) -> Iterator[Finding]:
    """What their config is made of (`nemo_rl.config`) and what the rest of the doctor does not look at."""
    ours = plan.values["nemo_fp8rl"]
    if ours["workers"] != "ours":
        return
    refusals = []
    try:
        check_keys(plan.values)
    except UserError as error:
        refusals.append(str(error))
    if plan.shape.kv_lora_rank or plan.shape.shared_experts or plan.shape.dense_layers:
        refusals.append(
            "the model is none of Llama 3, Qwen2.5, Qwen3 or Qwen3-MoE, which our trainer has; set "
            "nemo_fp8rl.workers=nemo_rl"
        )
    if ours["align"] == "vllm":
        refusals.append("nemo_fp8rl.align=vllm rounds as vLLM's CPU kernels do; on GPUs set nemo_fp8rl.align=none")
    yield from (Finding("error", TOPIC, refusal) for refusal in refusals)
    if not refusals:
        yield Finding("ok", TOPIC, "our own trainer and engines take this recipe")
