"""Print an engine's answers: built from an exported model, and fed by the trainer's stream through NeMo RL's extension.

Usage: python -m tests.nemo_rl.stock.stock_engine FOLDER KV_CACHE_DTYPE TRANSPORT
FOLDER has model_0, model_1, fp8_0 and fp8_1; TRANSPORT is batches or checkpoint_engine.
"""

import asyncio
import gc
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

from nemo_fp8rl.nemo_rl.compat import prepare

prepare()

from nemo_rl.models.generation.vllm.quantization.fp8_train_utils import get_vllm_qkv_scale_names  # noqa: E402
from nemo_rl.models.generation.vllm.vllm_backend import VllmInternalWorkerExtension  # noqa: E402

from nemo_fp8rl.fp8.kernels import load_emulation  # noqa: E402
from nemo_fp8rl.generation import vllm_compat  # noqa: E402
from nemo_fp8rl.generation.fp8_method.plugin import QUANTIZATION  # noqa: E402
from nemo_fp8rl.hf.checkpoint_reader import CheckpointReader  # noqa: E402
from nemo_fp8rl.nemo_rl.refit_transport.settings import ENGINE  # noqa: E402
from nemo_fp8rl.nemo_rl.stock.worker_choice import choose_workers, declare_kv_cache  # noqa: E402
from tests.nemo_rl.built_models import use_emulated_fp8  # noqa: E402
from tests.nemo_rl.stock.fake_trainer import KV_SCALES, StreamingWorker, policy  # noqa: E402

EXTENSION = "nemo_rl.models.generation.vllm.vllm_backend.VllmInternalWorkerExtension"
SENDERS: list[Any] = []
"""The trainer's side of the checkpoint engine."""
if hasattr(VllmInternalWorkerExtension, "synchronize_device"):  # it is written for vLLM 0.25; the newest has its own
    del VllmInternalWorkerExtension.synchronize_device
BATCH_SIZE = 3
PROMPTS = [[3, 9, 12, 5], [7, 7, 12, 4, 4]]


def engine(model: Path, **arguments: Any) -> Any:
    from vllm import LLM

    return LLM(
        model=str(model), skip_tokenizer_init=True, max_model_len=64, enforce_eager=True, disable_log_stats=True,
        kv_cache_memory_bytes=1 << 26, enable_prefix_caching=False, dtype="bfloat16", max_num_seqs=8,
        enable_chunked_prefill=False, max_num_batched_tokens=512, **arguments,
    )  # fmt: skip


def answers(llm: Any) -> str:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=8, logprobs=0, detokenize=False, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], sampling, use_tqdm=False)
    samples = [output.outputs[0] for output in outputs]
    return repr([[(t, e[t].logprob) for t, e in zip(s.token_ids, s.logprobs, strict=True)] for s in samples])


def feed(worker: Any, stream: dict[str, Any], names: list[str] | None = None) -> None:
    """Load the stream as NeMo RL's `update_weights_via_ipc_zmq` does. names: all that was announced, or fewer."""
    worker.prepare_refit_info({name: (tensor.shape, tensor.dtype) for name, tensor in stream.items()})
    with worker._weight_update_lifecycle("ipc") as finalize:
        names = names or list(stream)
        for start in range(0, len(names), BATCH_SIZE):
            batch = [(name, stream[name].clone()) for name in names[start : start + BATCH_SIZE]]
            worker._load_weights(batch)
            for _, tensor in batch:
                tensor.view(-1)[:].zero_()  # the sender's memory is used again
        finalize()


def feed_by_checkpoint_engine(worker: Any, stream: dict[str, Any]) -> None:
    """Load the stream as NeMo RL's synchronizer does with our checkpoint engine; the sender is in a thread."""
    from nemo_rl.utils.checkpoint_engines.base import create_checkpoint_engine

    worker.prepare_refit_info({name: (tensor.shape, tensor.dtype) for name, tensor in stream.items()})
    if getattr(worker, "checkpoint_engine", None) is None:
        worker.init_checkpoint_engine(ENGINE, 1 << 20, {})
        SENDERS.append(create_checkpoint_engine(ENGINE, bucket_size_bytes=1 << 20, engine_kwargs={}))
        metadata = [SENDERS[0].prepare(), worker.prepare_checkpoint_engine()]
        SENDERS[0].init_policy_process_group(worker_rank=0, train_world_size=1, rollout_world_size=1, metadata=metadata)
        worker.init_checkpoint_engine_process_group(0, 1, 1, metadata)
    with ThreadPoolExecutor(1) as thread:
        sent = thread.submit(lambda: asyncio.run(SENDERS[0].send_weights(iter(stream.items()))))
        assert worker.update_weights_from_checkpoint_engine()
        sent.result()
    assert SENDERS[0].policy.metrics.whole == (SENDERS[0].policy.count == 1)  # every later version is a delta


FEEDS = {
    "batches": (EXTENSION, feed),
    "checkpoint_engine": (f"{EXTENSION}WithCheckpointEngine", feed_by_checkpoint_engine),
}


def streamed(folder: Path, kv_cache_dtype: str, transport: str) -> None:
    """Print the answers of an engine after each refit; vLLM chooses the FP8 layers, emulated ones multiply."""
    cfg = policy(kv_cache_dtype=kv_cache_dtype)
    choose_workers(cfg, 2, survives_refit=True)
    kwargs = cfg["generation"]["vllm_kwargs"]
    trainer = SimpleNamespace(cfg=cfg["generation"])
    declare_kv_cache(trainer, cfg)
    cache = {name: kwargs[name] for name in ("kv_cache_dtype",) if name in kwargs}
    load_emulation("cpu")
    vllm_compat.survive_scan_of_llvmlite()
    use_emulated_fp8()
    llm = engine(
        folder / "model_0", hf_overrides=cfg["hf_config_overrides"], load_format="dummy",
        worker_cls=kwargs["worker_cls"], worker_extension_cls=FEEDS[transport][0], **cache,
    )  # fmt: skip
    for seed, factor in ((1, 1.0), (0, 1.3), (0, 1.0), (1, 1.0), (0, 1.0)):
        with CheckpointReader(folder / f"model_{seed}") as checkpoint:
            weights = {name: checkpoint.get(name) for name in sorted(checkpoint.names)}
        worker = StreamingWorker({**cfg, "generation": trainer.cfg}, weights)
        scales = {name: factor * scale for name, scale in kv_scales(seed).items()}
        stream = dict(worker._iter_params_with_optional_kv_scales(kv_scales=scales))
        llm.collective_rpc(FEEDS[transport][1], args=(stream,))
        refit = f"streamed_{seed}" if factor == 1 else "other_scales"
        print(f"{refit}\t{answers(llm)}", flush=True)
    without = {name: tensor for name, tensor in stream.items() if not name.endswith("o_proj.weight_scale_inv")}
    half = list(stream)[: len(stream) // 2]
    refusals = {"without": (without,), "half": (stream, half), "after_half": (stream,)}
    if cache:
        refusals = {"scaleless": ({n: x for n, x in stream.items() if n != KV_SCALES[-1]},)} | refusals
    for refit, arguments in refusals.items():
        try:
            llm.collective_rpc(feed, args=arguments)
        except RuntimeError as error:
            print(f"{refit}\t{error}", flush=True)


def fresh(folder: Path, seed: int, kv_cache_dtype: str) -> None:
    scales = {name: torch.tensor(scale) for name, scale in kv_scales(seed).items() if "q_scale" not in name}
    if kv_cache_dtype != "auto":
        save_file(scales, folder / f"fp8_{seed}/kv_scales.safetensors")
    llm = engine(folder / f"fp8_{seed}", quantization=QUANTIZATION, kv_cache_dtype=kv_cache_dtype)
    print(f"fresh_{seed}\t{answers(llm)}", flush=True)


def kv_scales(seed: int) -> dict[str, float]:
    """Return scales that are no powers of two, as NeMo RL's calibration gives them, in bfloat16.

    vLLM rounds a checkpoint's scales to bfloat16. Queries are not FP8 on a CPU.
    """
    return {name: torch.tensor(0.003 * (1 + i + seed)).bfloat16().item() for i, name in enumerate(KV_SCALES)}


if __name__ == "__main__":
    assert list(map(get_vllm_qkv_scale_names, range(2))) == [
        dict(zip(("q_scale", "k_scale", "v_scale"), KV_SCALES[i : i + 3], strict=True)) for i in (0, 3)
    ]
    folder, kv_cache_dtype = Path(sys.argv[1]), sys.argv[2]
    streamed(folder, kv_cache_dtype, sys.argv[3])
    for seed in (0, 1):
        gc.collect()  # an engine ends its process groups when it is collected: before the next one makes its own
        fresh(folder, seed, kv_cache_dtype)
