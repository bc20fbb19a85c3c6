"""The methods that vLLM's worker gets (`worker_extension_cls`): it receives refits, gives memory back, records experts.

Only bytes, numbers and texts cross vLLM's process borders: errors are returned as texts, parts as JSON.
"""

import gc
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any, Literal

import torch
from safetensors.torch import save
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform

from nemo_fp8rl.fp8 import can_vllm_read_fp8_cache
from nemo_fp8rl.generation import vllm_compat
from nemo_fp8rl.generation.answers.expert_routes import RouteRecorder
from nemo_fp8rl.generation.fp8_method.fp8_caches import fp8_caches
from nemo_fp8rl.generation.fp8_method.stored_weights import MoEMethod, QuantizedLinearMethod
from nemo_fp8rl.generation.weights.weight_store import WeightStore
from nemo_fp8rl.hf.checkpoint_reader import CheckpointReader
from nemo_fp8rl.hf.model_config import read_hf_config
from nemo_fp8rl.hf.shared_operations import Shapes
from nemo_fp8rl.ops import flash_attention
from nemo_fp8rl.refit.manifest import RefitError, from_json, to_json
from nemo_fp8rl.refit.receiver.piece_receiver import IncomingLink
from nemo_fp8rl.refit.transport.handshake import connect
from nemo_fp8rl.refit.transport.shared_memory import domain

Tag = Literal["weights", "kv_cache"]
"""vLLM's names of the two kinds of memory that sleep."""

# vLLM imports this module in every process of our engines, before the model is built.
if vllm_compat.has_kv_windows():
    if current_platform.is_cpu():
        from nemo_fp8rl.generation.kv_window.on_cpu import register_windows
    else:
        from nemo_fp8rl.generation.kv_window.on_gpu import register_windows
    register_windows()
elif not can_vllm_read_fp8_cache():
    from nemo_fp8rl.generation.fp8_method.on_cpu.emulated_cache import emulate_fp8_caches

    emulate_fp8_caches()


class RefitWorkerExtension:
    """A mixin of vLLM's worker. The attributes `model_runner` to `wake_up` are the worker's own."""

    model_runner: Any
    vllm_config: Any
    rank: int
    sleep: Callable[[int], None]
    wake_up: Callable[[list[str]], None]
    routes: RouteRecorder
    refit_links: Sequence[IncomingLink] = ()
    kv_scales: list[tuple[Any, list[Tensor]]] = []  # noqa: RUF012, replaced and never mutated
    """Attention layers with the scales (k, v, q) of their FP8 caches, saved while the engine sleeps on a GPU."""

    @cached_property
    def freed_storages(self) -> dict[Tag, list[tuple[Any, int]]]:
        """The memory that sleeps: on a CPU storages with their sizes; on a GPU tags alone, vLLM knows the memory."""
        return {}

    @cached_property
    def weight_store(self) -> WeightStore:
        return WeightStore(self.model_runner)

    def nemo_fp8rl_end_with(self, process: int) -> None:
        """End this process, and so vLLM's core, once another process has ended: vLLM does not see a client killed."""
        ends = select.poll()
        ends.register(os.pidfd_open(process), select.POLLIN)

        def wait() -> None:
            ends.poll()
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=wait, name="end with the client", daemon=True).start()

    def nemo_fp8rl_stored_parts(self) -> tuple[str, str]:
        """Return (the parts that this rank stores, "" or the reason why they are unknown)."""
        return _call_or_refuse(lambda: to_json(self.weight_store.parts), "")

    def nemo_fp8rl_domain(self) -> str:
        return domain()

    def nemo_fp8rl_connect(self, links: Sequence[Sequence[Sequence[Any]]], token: str, timeout: float) -> str:
        """Take this rank's links, and return "", or the reason why that failed.

        links:  [source][sink] of (address or end, route in JSON); address None where there is no link
        """

        def connect() -> str:
            self.nemo_fp8rl_disconnect()
            device = self.model_runner.device
            to_this_rank = [of_source[self.rank] for of_source in links]
            self.refit_links = [
                IncomingLink(_end(address, token, timeout, device), from_json(route))
                for address, route in to_this_rank
                if address is not None
            ]
            return ""

        return _call_or_refuse(connect, "")[1]

    def nemo_fp8rl_disconnect(self) -> None:
        for link in self.refit_links:
            link.end.close()
        self.refit_links = ()

    def nemo_fp8rl_offer(
        self, engine: int, routes: Sequence[Sequence[str]], capacities: Sequence[Sequence[int]], *how: Any
    ) -> tuple[list[Any], str]:
        """Get ready for this rank's links to another engine; return (addresses, "" or the reason why that failed).

        routes, capacities: [source][sink], the routes in JSON
        how:    transport, host, token and timeout of the links
        """

        def offer() -> list[Any]:
            of_this_rank = [from_json(route) for route in routes[self.rank]]
            return self.weight_store.for_peers.offer(engine, of_this_rank, capacities[self.rank], *how)

        return _call_or_refuse(offer, [])

    def nemo_fp8rl_withdraw(self, engine: int) -> None:
        self.weight_store.for_peers.withdraw(engine)

    def nemo_fp8rl_start_push(self, version: int, engines: Sequence[int], how: dict[str, bool]) -> str:
        """Begin to send the weights in memory to other engines; return "", or the reason why that cannot be."""
        store = self.weight_store

        def start() -> None:
            store.for_peers.start_push(store.contents(), version, engines, **how)

        return _call_or_refuse(start, None)[1]

    def nemo_fp8rl_finish_push(self) -> tuple[dict[str, Any], list[tuple[int, int, str]], str]:
        """Return (the report's fields, broken links as (engine, rank, reason), "" or the reason of a failure)."""

        def finish() -> tuple[dict[str, Any], list[tuple[int, int, str]]]:
            fields = asdict(self.weight_store.for_peers.finish_push())
            return fields, [(*link, why) for link, why in fields.pop("failed").items()]

        (fields, failed), refusal = _call_or_refuse(finish, ({}, []))
        return fields, failed, refusal

    def nemo_fp8rl_load(
        self, version: int, verify: bool, compare: bool, with_frozen: bool
    ) -> tuple[list[str], list[str], float, float, str]:
        """Load or compare a version.

        Return (names of this rank's tensors that can be written in place, names of the others, seconds, seconds for
        digests, "" or the reason why it failed).
        """
        start = time.perf_counter()

        def load() -> None:
            if not self.refit_links:
                raise RefitError("this engine has no link to a trainer")
            if compare:
                self.weight_store.compare(self.refit_links, version, with_frozen)
                return
            with set_current_vllm_config(self.vllm_config):  # as vLLM's own worker reloads
                self.weight_store.load(self.refit_links, version, verify, with_frozen)

        _, refusal = _call_or_refuse(load, None)
        if refusal:
            self.nemo_fp8rl_disconnect()  # or the trainer would wait until the rest is read
            gc.collect()  # errors keep frames, these keep links, and the source is about to free the links' memory
        store = self.weight_store
        repacked = store.all_slots.keys() - store.direct_names
        return sorted(store.direct_names), sorted(repacked), time.perf_counter() - start, store.verify_seconds, refusal

    def nemo_fp8rl_read_kv_scales(self) -> str:
        """Take the scales of an FP8 cache from the checkpoint; return "", or a sentence about a missing one."""
        with CheckpointReader(self.model_runner.vllm_config.model_config.model) as checkpoint:
            for names, attention in fp8_caches(self.model_runner.get_model()).items():
                if missing := [name for name in names if name not in checkpoint.names]:
                    return f"{checkpoint.folder} lacks {missing[0]}, a scale of the FP8 KV cache"
                vllm_compat.set_kv_scales(attention, *(checkpoint.get(name) for name in names))
        return ""

    def nemo_fp8rl_kernels(self) -> list[str]:
        """Return the kernels of FP8 layers, vLLM's attention backend, and the mode of its CUDA graphs, in words."""
        modules = list(self.model_runner.get_model().modules())
        methods = (getattr(module, "quant_method", None) for module in modules)
        fp8 = {m.kernel_name for m in methods if isinstance(m, QuantizedLinearMethod | MoEMethod)}
        attention = {f"attention: {m.attn_backend.get_name()}" for m in modules if isinstance(m, Attention)}
        if any(getattr(m.impl, "emulates", False) for m in modules if isinstance(m, Attention)):
            attention.add("FP8 KV cache: emulated")
        if any(isinstance(m, Attention) and getattr(m, "query_quant", None) is not None for m in modules):
            attention.add("queries beside an FP8 cache: rounded to E4M3")
        if getattr(self.vllm_config.quant_config, "is_aligned", False):
            fp8.add("operations shared with the trainer (nemo_fp8rl.ops)")
        if getattr(self.vllm_config.quant_config, "uses_flash_attention_3", False):
            attention.add(flash_attention.NAME)
        graphs = f"CUDA graphs: {self.vllm_config.compilation_config.cudagraph_mode.name.lower()}"
        return sorted(fp8 | attention | {graphs})

    def nemo_fp8rl_sleep(self, level: int) -> int:
        """Free the KV cache, at level 2 the weights as well, and return the bytes. Tensors stay, without memory.

        On a GPU vLLM's own sleep mode does this. It brings tensors back to the same addresses, as CUDA graphs need it;
        at level 1 it moves the weights to the host.
        """
        if "weight_store" in self.__dict__:
            self.weight_store.for_peers.stop()
        if current_platform.is_cuda():
            return self._sleep_on_gpu(level)
        freed = self._free("kv_cache", self.model_runner.kv_caches) if level else 0
        if level == 2:
            self.weight_store.offered.withdraw()
            freed += self._free("weights", self.model_runner.get_model().parameters())
            freed += self.weight_store.drop_dequantized()
        return freed

    def _free(self, tag: Tag, tensors: Iterable[Tensor]) -> int:
        storages = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        freed = [(storage, storage.nbytes()) for storage in storages.values() if storage.nbytes()]
        for storage, _ in freed:
            storage.resize_(0)
        self.freed_storages[tag] = self.freed_storages.get(tag, []) + freed
        return sum(nbytes for _, nbytes in freed)

    def nemo_fp8rl_wake(self, tag: Tag) -> None:
        """Allocate the memory again that `nemo_fp8rl_sleep` freed, on a CPU filled with zeros. Weights come first."""
        freed = self.freed_storages.get(tag)
        if freed is not None and current_platform.is_cuda():
            gc.collect()
            torch.cuda.empty_cache()  # or a trainer in this process would keep memory that it no longer uses
            if tag == "kv_cache":
                self.kv_scales = self._kv_scales()  # a refit may have set others meanwhile
            self.wake_up([tag])
            for attention, scales in self.kv_scales:  # vLLM may have reset them to 1
                vllm_compat.set_kv_scales(attention, *scales)
        for storage, nbytes in freed or ():
            storage.resize_(nbytes)
            storage.fill_(0)
        self.freed_storages.pop(tag, None)  # only now: the memory is there

    def _sleep_on_gpu(self, level: int) -> int:
        if self.freed_storages:
            return 0
        self.kv_scales = self._kv_scales()
        before = torch.cuda.mem_get_info()[0]
        self.sleep(level)
        self.freed_storages["weights"] = self.freed_storages["kv_cache"] = []
        return max(0, torch.cuda.mem_get_info()[0] - before)

    def _kv_scales(self) -> list[tuple[Any, list[Tensor]]]:
        caches = fp8_caches(self.model_runner.get_model()).values()
        return [(c, [scale.cpu().clone() for scale in (c._k_scale, c._v_scale, c._q_scale)]) for c in caches]

    def nemo_fp8rl_record_routes(self) -> None:
        """Record the experts of every token from now on."""
        hf = read_hf_config(self.model_runner.vllm_config.model_config.model)
        self.routes = RouteRecorder(self.model_runner, hf.num_hidden_layers, hf.num_experts_per_tok)
        vllm_compat.record_routes(self.model_runner.get_model(), self.routes)

    def nemo_fp8rl_share_log_softmax(self) -> None:
        """Compute the log-probs of sampled tokens by the operation that the trainer calls."""
        from nemo_fp8rl.generation.fp8_method.shared_ops.sampler import share_log_probs

        share_log_probs(self.model_runner)

    def nemo_fp8rl_fingerprint(self, shapes: dict[str, Any]) -> list[tuple[str, str]]:
        """Return (operation, digest) of the operations that this rank shares with the trainer.

        shapes:  `hf.shared_operations.Shapes` as a dictionary
        """
        from nemo_fp8rl.generation.fp8_method.shared_ops.fingerprint import engine_fingerprint

        return sorted(engine_fingerprint(Shapes(**shapes), self.model_runner.device, self.vllm_config))

    def nemo_fp8rl_take_block_counts(self) -> tuple[int, int, int]:
        """Return `kv_window.spec.take_block_counts` of this process: zeros unless vLLM's core is in it."""
        from nemo_fp8rl.generation.kv_window.spec import take_block_counts

        return take_block_counts()

    def nemo_fp8rl_take_routes(self, is_wanted: bool) -> bytes:
        """Return the records since the last call (`RouteRecorder.take`) as safetensors; empty where not wanted."""
        return save(self.routes.take() if is_wanted else self.routes.forget())


def _end(address: Any, token: str, timeout: float, device: torch.device) -> Any:
    if not isinstance(address, list | tuple):
        return address  # the receiving end itself, of a trainer in this process
    host, port, name = address
    return connect((host, port), token, name, timeout, device)


def _call_or_refuse(method: Callable[[], Any], nothing: Any) -> tuple[Any, str]:
    """Return (the result of the method, ""), or (`nothing`, the text of a RefitError)."""
    try:
        return method(), ""
    except RefitError as error:
        return nothing, str(error) or type(error).__name__
