"""What an engine does on a GPU alone, with stand-ins for the parts of vLLM that a CPU lacks."""

import asyncio
import os
import socket
import tempfile
import threading
import time
import uuid
from collections import deque
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.generation.core import AsyncCore, Request, SteppedCore
from nemo_fp8rl.generation.engine import VllmEngine
from nemo_fp8rl.workers import WorkerDied, vllm_sockets
from tests.generation.pair import GREEDY


def test_a_batch_that_vllm_ran_ahead_is_taken_in_before_anything_else():
    """Asynchronous scheduling is off on a CPU; `batch_queue` is vLLM's, then None (v1/engine/core.py)."""
    stepped = []

    def step():
        stepped.append(ahead.popleft())
        return []

    ahead = deque(["after the last answer"])
    core = object.__new__(SteppedCore)
    core.llm = SimpleNamespace(step=step, engine_core=SimpleNamespace(engine_core=SimpleNamespace(batch_queue=ahead)))
    assert list(core.stream([])) == []
    assert stepped == ["after the last answer"]


def test_a_thread_that_waits_for_an_answer_hears_of_a_shutdown():
    """With an engine in the place of vLLM's that never answers."""

    class Silent:
        async def generate(self, *request):
            await asyncio.sleep(3600)
            yield

        def shutdown(self):
            pass

    core, heard = object.__new__(AsyncCore), []
    core.llm, core.timeout, core._ids, core._loop = Silent(), 3600.0, count(), asyncio.new_event_loop()

    def ask() -> None:
        try:
            list(core.stream([Request((1,), SimpleNamespace(max_tokens=1))]))
        except WorkerDied as death:
            heard.append(str(death))

    threads = [threading.Thread(target=core._loop.run_forever, daemon=True), threading.Thread(target=ask, daemon=True)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    core.shutdown()
    threads[1].join(timeout=10)
    assert heard == ["the engine was shut down"]


def test_stop_strings_that_nobody_would_see_are_refused():
    engine = VllmEngine()
    engine.has_no_tokenizer = True
    with pytest.raises(UserError, match=r"\['</a>'\].*policy.generation.vllm_cfg.skip_tokenizer_init=false"):
        engine._sampling_params(replace(GREEDY, stop_strings=("</a>",)), 1, 0)


def test_nobody_begins_an_answer_while_an_engine_waits_to_sleep():
    engine, refused = VllmEngine(), []
    engine.policy_version, engine.core = 1, SimpleNamespace(reset_prefix_cache=lambda: False)

    def sleep() -> None:
        try:
            engine.finish_generation(1)
        except RuntimeError as error:
            refused.append(str(error))

    sleeper = threading.Thread(target=sleep, daemon=True)
    with engine.readers.count_reader(engine._begin):
        sleeper.start()
        deadline = time.monotonic() + 10
        while not engine.sleep_level and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(RuntimeError, match="this engine sleeps"):
            engine._begin()
        assert refused == []
    sleeper.join(timeout=10)
    assert refused == ["the engine cannot sleep: answers are still being generated"]
    assert engine._begin() == 1  # as before, since it did not


@pytest.mark.parametrize(("given", "kept"), [(None, False), ("/tmp/fp8rl_of_another", False), ("/tmp/theirs", True)])
def test_sockets_are_in_a_folder_of_the_processes_own_or_where_the_user_says(monkeypatch, given, kept):
    """A process that Ray starts inherits the variable of the one that asked for it."""
    monkeypatch.delenv(vllm_sockets.VARIABLE, raising=False)
    if given:
        monkeypatch.setenv(vllm_sockets.VARIABLE, given)
    vllm_sockets.make_folder()
    assert os.environ[vllm_sockets.VARIABLE] == (given if kept else str(vllm_sockets.folder()))
    assert vllm_sockets.folder().is_dir() != kept
    vllm_sockets.remove_folder()
    assert not vllm_sockets.folder().exists()
    assert os.environ.get(vllm_sockets.VARIABLE) == (given if kept else None)  # for what this process starts later


@pytest.mark.parametrize("length", [10, 70, 200])
def test_a_socket_fits_whatever_the_folder_for_temporary_files(monkeypatch, length):
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        long = Path(short) / ("x" * length)
        long.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(long))
        monkeypatch.setenv(vllm_sockets.VARIABLE, "/tmp/fp8rl_of_another")
        vllm_sockets.folder.cache_clear()
        vllm_sockets.make_folder()
        folder = vllm_sockets.folder()
        assert (folder.parent == long) == (length < 50)
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(f"{os.environ[vllm_sockets.VARIABLE]}/{uuid.uuid4()}")
        vllm_sockets.remove_folder()
        assert not folder.exists()
        vllm_sockets.folder.cache_clear()


def test_engines_that_others_set_up_get_a_short_folder_too(monkeypatch):
    monkeypatch.setenv(vllm_sockets.VARIABLE, "")
    monkeypatch.delenv(vllm_sockets.VARIABLE)
    for folder, chosen in (("/tmp/" + "x" * 65, None), ("/tmp/" + "x" * 66, "/tmp")):
        monkeypatch.setattr(tempfile, "tempdir", folder)
        vllm_sockets.shorten_default()
        assert os.environ.get(vllm_sockets.VARIABLE) == chosen


def test_a_folder_of_the_users_that_is_too_long_is_refused(monkeypatch):
    monkeypatch.setenv(vllm_sockets.VARIABLE, "/tmp/" + "x" * 66)
    with pytest.raises(UserError, match=f"{vllm_sockets.VARIABLE}=/tmp/xxx"):
        vllm_sockets.make_folder()


@pytest.fixture
def worker(monkeypatch):
    """One on a GPU, with vLLM's sleep mode, which puts 1 for the scales of an FP8 cache when it wakes (0.25)."""
    from nemo_fp8rl.generation.weights import worker_extension
    from nemo_fp8rl.generation.weights.worker_extension import RefitWorkerExtension

    names = (f"_{x}_scale{end}" for x in "kvq" for end in ("", "_cpu"))
    scales = {name: torch.tensor(0.0) for name in names if name != "_q_scale_cpu"}
    attention = SimpleNamespace(**scales, impl=SimpleNamespace(bmm1_scale=3.0))
    free = [100]
    sizes = {"weights": 5, "kv_cache": 20}

    class FakeGpuWorker(RefitWorkerExtension):
        model_runner = SimpleNamespace(get_model=lambda: None)
        slept = 0

        def sleep(self, level):
            self.slept += 1
            free[0] += sum(sizes.values())

        def wake_up(self, tags):
            free[0] -= sum(sizes[tag] for tag in tags)
            for scale in (attention._k_scale, attention._v_scale, attention._q_scale):
                scale.fill_(1.0)

    monkeypatch.setattr(worker_extension, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    monkeypatch.setattr(worker_extension, "fp8_caches", lambda model: {("k", "v", "q"): attention})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free[0], 200))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    worker = FakeGpuWorker()
    worker.attention, worker.free = attention, free
    return worker


def scales_of(attention) -> tuple[float, ...]:
    return tuple(float(scale) for scale in (attention._k_scale, attention._v_scale, attention._q_scale))


def test_scales_of_a_cache_outlast_a_sleep_on_a_gpu(worker):
    from nemo_fp8rl.generation import vllm_compat

    vllm_compat.set_kv_scales(worker.attention, *map(torch.tensor, (0.5, 0.25, 0.125)))
    assert worker.attention.impl.bmm1_scale is None  # which FlashInfer makes of the scales, once
    assert worker.nemo_fp8rl_sleep(1) == 25
    assert worker.nemo_fp8rl_sleep(2) == 0  # asleep already
    assert worker.slept == 1
    worker.nemo_fp8rl_wake("weights")
    assert worker.free == [120]
    assert scales_of(worker.attention) == (0.5, 0.25, 0.125)
    assert worker.attention._k_scale_float == 0.5
    vllm_compat.set_kv_scales(worker.attention, *map(torch.tensor, (2.0, 4.0, 8.0)))  # a refit's
    worker.nemo_fp8rl_wake("kv_cache")
    assert worker.free == [100]
    assert scales_of(worker.attention) == (2.0, 4.0, 8.0)
    for tag in ("weights", "kv_cache"):
        worker.nemo_fp8rl_wake(tag)  # awake: nothing to do
