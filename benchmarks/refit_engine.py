"""The engine's side of refit.py: our worker extension, and the classic way to load, to hold ours against."""

import ctypes
import resource
import time
from dataclasses import replace
from pathlib import Path
from threading import Timer

import torch
from measure import ON_GPU, wait_for_gpu
from torch import Tensor

from nemo_fp8rl.commands.parity.formulas import nemo_rl
from nemo_fp8rl.fp8 import BLOCK, scale_name
from nemo_fp8rl.generation import vllm_compat
from nemo_fp8rl.generation.weights.worker_extension import RefitWorkerExtension
from nemo_fp8rl.refit.receiver.piece_receiver import receive_pieces
from nemo_fp8rl.refit.transport.link import ReceivingEnd
from nemo_fp8rl.refit.transport.places import Offer


class RateLimited:
    """A receiving end over a link of so many bytes a second."""

    def __init__(self, end: ReceivingEnd, rate: float) -> None:
        self.end, self.rate, self.idle_from = end, rate, 0.0
        self.release, self.close, self.reach = end.release, end.close, None

    def open_places(self, version: int, offer: Offer | None) -> None:
        """Pieces that are written into places do not go over the link."""
        self.end.open_places(version, None)

    def receive(self) -> tuple[bytes, Tensor]:
        header, payload = self.end.receive()
        self.idle_from = max(self.idle_from, time.perf_counter()) + (len(header) + payload.numel()) / self.rate
        time.sleep(max(0.0, self.idle_from - time.perf_counter()))
        return header, payload


class BenchmarkExtension(RefitWorkerExtension):
    def bench_links(self, links: list, token: str) -> None:
        """Those of the classic way."""
        ours = self.refit_links
        self.refit_links = ()
        refusal = self.nemo_fp8rl_connect(links, token, 600.0)
        assert not refusal, refusal
        self.bench_ends = {"ours": ours, "classic": self.refit_links}

    def bench_use(self, name: str) -> None:
        self.refit_links = self.bench_ends[name]

    def bench_limit(self, rate: float | None) -> None:
        """From here on links carry so many bytes a second; None: what they can."""
        ends = [link.end.end if isinstance(link.end, RateLimited) else link.end for link in self.refit_links]
        ends = ends if rate is None else [RateLimited(end, rate) for end in ends]
        self.refit_links = [replace(link, end=end) for link, end in zip(self.refit_links, ends, strict=True)]

    def bench_direct(self, names: list[str]) -> None:
        """From here on only these are written in place; all else goes through vLLM's layerwise reload."""
        self.weight_store.direct_names = frozenset(names)

    def bench_drain(self, version: int) -> float:
        """Receive a version and drop it. Seconds."""
        start = time.perf_counter()
        for _ in receive_pieces(self.refit_links, version):
            pass
        wait_for_gpu()
        return time.perf_counter() - start

    def bench_messages(self, count: int) -> float:
        """Receive so many messages, and release them unread. Seconds."""
        start = time.perf_counter()
        for link in self.refit_links:
            for _ in range(count):
                link.end.receive()
                link.end.release()
        return time.perf_counter() - start

    def bench_classic(self, version: int, scale_format: str) -> float:
        """What arrives in bf16 is quantized here, by NeMo RL's formulation, and goes through layerwise reload."""
        start = time.perf_counter()
        quantized = {slot.part.name for slot in self.weight_store.slots.values() if bool(slot.part.format)}
        pieces: dict[str, Tensor] = {}

        def weights():
            for item in receive_pieces(self.refit_links, version):
                part = item.part
                whole = pieces.setdefault(part.name, item.content.data.new_empty(part.shape))
                whole[tuple(slice(a, b) for a, b in part.region)] = item.content.data
                if part.region[0][1] < part.shape[0]:
                    continue  # a band of rows of several
                if part.name not in quantized:
                    yield part.name, pieces.pop(part.name)
                    continue
                fp8 = nemo_rl(pieces.pop(part.name), BLOCK, scale_format)
                yield part.name, fp8.data
                yield scale_name(part.name), fp8.scale_inv

        with vllm_compat.preserve_nonpersistent_buffers(self.model_runner.get_model()):
            self.model_runner.reload_weights(weights_iterator=weights(), is_checkpoint_format=True)
        self.weight_store._derive(set())
        wait_for_gpu()
        return time.perf_counter() - start

    def bench_watch(self, delay: float) -> None:
        """From so many seconds after this call on, count what this process spends."""
        self.bench_timer = Timer(delay, lambda: setattr(self, "bench_cpu", _user_cpu()))
        self.bench_timer.start()

    def bench_spent(self) -> float:
        """User CPU seconds since then."""
        spent = _user_cpu()
        self.bench_timer.join()
        return spent - self.bench_cpu

    def bench_memory(self, begin: bool) -> int:
        """begin: start to watch; then the bytes by which the peak rose above that."""
        if ON_GPU:
            if begin:
                torch.cuda.reset_peak_memory_stats()
                self.bench_before = torch.cuda.memory_allocated()
            return torch.cuda.max_memory_allocated() - self.bench_before
        if begin:
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
            self.bench_before = _status("VmRSS")
            return 0
        return _status("VmHWM") - self.bench_before


def _user_cpu() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024
