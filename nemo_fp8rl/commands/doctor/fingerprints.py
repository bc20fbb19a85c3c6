"""The operations of `nemo_fp8rl.align=vllm` on this node's GPU: does the trainer compute the engine's bits?"""

import time
from collections.abc import Iterator

import torch

from nemo_fp8rl.commands.doctor.finding import Finding
from nemo_fp8rl.commands.doctor.recipe_plan import Plan
from nemo_fp8rl.commands.doctor.worker_limits import package_config
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.hf.shared_operations import Shapes, check_shared_operations, differing_operations, operation_shapes
from nemo_fp8rl.ops.alignment import has_gpu

TOPIC = "fingerprint"
Digests = frozenset[tuple[str, str]]


def check_fingerprints(plan: Plan) -> Iterator[Finding]:
    """Yield one finding for each operation whose bits differ, or one that says that none does.

    Trainer and engine run in this process and this environment, so it must have the libraries of both.
    """
    if not has_gpu():
        yield Finding("error", TOPIC, "--fingerprint runs the operations: start it on a node with a GPU")
        return
    started = time.perf_counter()
    try:
        with package_config(plan) as (hf, cfg):
            check_shared_operations(hf, cfg)
            shapes = operation_shapes(hf, cfg)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        trainer, engine = (of_side(shapes, device) for of_side in (_trainer, _engine))
    except UserError as error:
        yield Finding("error", TOPIC, str(error))
        return
    found = differing_operations(trainer, engine)
    for operation in found:
        yield Finding("error", TOPIC, f"trainer and engine do not compute the same bits in {operation}")
    if not found:
        text = f"trainer and engine compute the same bits in {len(trainer)} operations"
        yield Finding("ok", TOPIC, f"{text} ({time.perf_counter() - started:.1f} s)")


def _trainer(shapes: Shapes, device: torch.device) -> Digests:
    from nemo_fp8rl.policy.layer_specs import trainer_fingerprint

    return trainer_fingerprint(shapes, device)


def _engine(shapes: Shapes, device: torch.device) -> Digests:
    try:
        from vllm.config import VllmConfig

        from nemo_fp8rl.generation.fp8_method.shared_ops.fingerprint import engine_fingerprint
    except ImportError as error:
        raise UserError(
            f"--fingerprint: vLLM cannot be imported ({error}); run it in an environment that has it"
        ) from None
    return engine_fingerprint(shapes, device, VllmConfig())
