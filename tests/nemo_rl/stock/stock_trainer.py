"""What NeMo RL's own Megatron worker announces and streams, of a model that Megatron-Bridge built of a checkpoint.

Its methods, Bridge and Megatron are the real ones; Transformer Engine's compiled half is the contract's
(`tests.transformer_engine`). The worker is made without its `__init__`, which asks for GPUs.
"""

import importlib
import json
import re
import sys
import typing
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import typing_extensions
from safetensors.torch import save_file

from tests.transformer_engine.fake_kernels import fake_hopper, install

assert install(), "Transformer Engine's Python is not on the path"  # before Megatron looks for it

from nemo_fp8rl.nemo_rl.compat import prepare  # noqa: E402
from nemo_fp8rl.nemo_rl.stock.fp8_stream import Fp8Stream  # noqa: E402
from nemo_fp8rl.nemo_rl.stock.worker_choice import choose_workers, declare_kv_cache  # noqa: E402
from nemo_fp8rl.policy.on_cpu.megatron_on_cpu import megatron_on_cpu  # noqa: E402
from tests.nemo_rl.stock.fake_trainer import KV_SCALES, policy  # noqa: E402

WORKER = "nemo_rl.models.policy.workers.megatron_policy_worker"
DATA_LOADERS = ("WorkerConfig", "get_savable_loader", "get_train_dataset")


def worker_class() -> type:
    """Imported past what NeMo RL's main and Bridge ask for and do not use here: names of a Megatron Core that is newer
    than any release, `typing.override` of Python 3.12, data loaders of Energon.
    """
    typing.override = typing_extensions.override  # type: ignore[attr-defined]
    energon = ModuleType("megatron.energon")
    vars(energon).update(dict.fromkeys(DATA_LOADERS))
    sys.modules["megatron.energon"] = energon
    prepare()
    while True:
        try:
            return importlib.import_module(WORKER).MegatronPolicyWorkerImpl
        except ImportError as error:
            absent = re.match(r"cannot import name '(\w+)' from '(megatron\.core[\w.]+)'", str(error))
            if absent is None:
                raise
            setattr(importlib.import_module(absent[2]), absent[1], type(absent[1], (), {}))


def worker(folder: Path, fp8_param: bool) -> Any:
    """fp8_param: holding FP8 alone where the recipe's trainer is in FP8."""
    streaming = object.__new__(type("Streaming", (Fp8Stream, worker_class()), {}))

    from megatron.bridge import AutoBridge
    from megatron.core import parallel_state
    from nemo_rl.models.megatron.setup import _merge_model_overrides

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    bridge = AutoBridge.from_hf_pretrained(str(folder))
    provider = bridge.to_megatron_provider(load_weights=False)
    provider.use_cpu_initialization, provider.gradient_accumulation_fusion = True, False
    cfg = policy(kv_cache_dtype="fp8")
    cfg["generation"]["backend"] = "vllm"
    cfg["megatron_cfg"]["fp8_cfg"] |= {"fp8": "e4m3", "fp8_recipe": "blockwise", "fp8_param": fp8_param}
    choose_workers(cfg, 2, survives_refit=True)
    provider = _merge_model_overrides(provider, cfg["megatron_cfg"]["model_overrides"])
    provider.fp8, provider.fp8_recipe, provider.fp8_param = "e4m3", "blockwise", fp8_param
    provider.finalize()
    with mock.patch.object(torch, "empty", torch.zeros):  # on a CPU Megatron does not fill what is quantized at once
        model = provider.provide(pre_process=True, post_process=True)
    bridge.load_hf_weights([model])
    engine = SimpleNamespace(cfg=cfg["generation"])
    declare_kv_cache(engine, cfg)
    streaming.cfg, streaming.fp8_cfg = {**cfg, "generation": engine.cfg}, cfg["megatron_cfg"]["fp8_cfg"]
    streaming.megatron_bridge, streaming.model, streaming.draft_model = bridge, model, None
    streaming.dtype = torch.bfloat16
    return streaming


@torch.no_grad()
def quadruple(model: torch.nn.Module) -> None:
    """In place of an optimizer step: other bytes where bfloat16 is, other scales where FP8 is."""
    from transformer_engine.pytorch.quantized_tensor import QuantizedTensor

    for weight in model.parameters():
        (weight._rowwise_scale_inv if isinstance(weight, QuantizedTensor) else weight).mul_(4)


def main(folder: Path, fp8_param: bool) -> None:
    as_it_is = torch.tensor

    def on_cpu(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return as_it_is(*args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(megatron_on_cpu())
        stack.enter_context(fake_hopper())
        streaming = worker(folder / "model", fp8_param)
        stack.enter_context(mock.patch.object(torch, "tensor", on_cpu))  # scales, for which the worker says "cuda"
        info = streaming.prepare_refit_info()
        try:
            next(streaming._iter_params_with_optional_kv_scales(kv_scales=None))
        except RuntimeError as error:
            print(f"refused\t{error}")
        held = {type(weight).__name__ for name, weight in streaming.model.named_parameters() if ".linear_fc1." in name}
        print(f"held\t{sorted(held)}")
        quadruple(streaming.model)
        scales = {name: 0.01 * (i + 1) for i, name in enumerate(KV_SCALES)}
        stream = dict(streaming._iter_params_with_optional_kv_scales(kv_scales=scales))
    announced = {name: [list(shape), str(dtype)] for name, (shape, dtype) in info.items()}
    (folder / "announced.json").write_text(json.dumps(announced))
    save_file({name: tensor.detach().clone() for name, tensor in stream.items()}, folder / "stream.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), "fp8_param" in sys.argv[2:])
