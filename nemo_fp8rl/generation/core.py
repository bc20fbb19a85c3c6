"""Drives one vLLM engine: stepped in this process, or behind AsyncLLM with its core in a process of its own.

Both take `Request`s and yield vLLM's RequestOutput of each as soon as it is complete.
"""

import asyncio
import os
import queue
import signal
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any, NamedTuple, Protocol

from nemo_fp8rl.common.vllm_version import ENGINE_THREAD
from nemo_fp8rl.generation import vllm_compat
from nemo_fp8rl.generation.interface import SECONDS_A_TOKEN, Sampling
from nemo_fp8rl.workers import WorkerDied


class Request(NamedTuple):
    """A prompt for vLLM.

    token_ids:   the prompt's tokens
    params:      vLLM's SamplingParams, with output_kind FINAL_ONLY
    cache_salt:  requests share cached keys only with requests of the same salt; "" is one as well
    """

    token_ids: tuple[int, ...]
    params: Any
    cache_salt: str = ""


class Core(Protocol):
    """One vLLM engine. What its workers take and return may cross a process border: bytes, numbers and texts alone."""

    def stream(self, requests: Sequence[Request]) -> Iterator[tuple[int, Any]]:
        """Yield (position in `requests`, RequestOutput) as each is complete; abort the rest when the caller stops."""
        ...

    def rpc(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of the worker extension in each worker process of the engine, and return the results."""
        ...

    def reset_prefix_cache(self) -> bool: ...

    def take_block_counts(self) -> tuple[int, int, int]:
        """Return `kv_window.spec.take_block_counts`; zeros where the core's process has no worker of ours."""
        ...

    def pause(self, recompute: bool) -> None:
        """Return once no token is being computed; requests in progress, and new ones, then wait for `resume`.

        recompute:  drop all cached keys; those of requests in progress are computed again after `resume`
        Raises:     NotImplementedError in a core that cannot
        """
        ...

    def resume(self, version: int) -> None:
        """Go on. Tokens are labelled with this version until the next one (`completions.versions_of`)."""
        ...

    def check_health(self) -> None:
        """Raise WorkerDied where the engine cannot go on."""
        ...

    def shutdown(self) -> None: ...


class SteppedCore:
    """vLLM's LLMEngine in this process; with tensor parallelism its workers are processes of their own.

    timeout:  seconds within which a worker process must answer a call. A forward has vLLM's own limit,
              VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS. After either limit the engine counts as dead.
    """

    def __init__(self, arguments: dict[str, Any], timeout: float) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine core in this process: a refit is not copied
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        self.has_rank_processes, self.timeout = arguments["tensor_parallel_size"] > 1, timeout
        with _block_interrupts():
            # the context of vLLM's own LLM class: by default a bare engine has batches an eighth as large
            self.llm = LLMEngine.from_engine_args(EngineArgs(**arguments), usage_context=UsageContext.LLM_CLASS)
        self._ids = count()

    def stream(self, requests: Sequence[Request]) -> Iterator[tuple[int, Any]]:
        waiting = {str(next(self._ids)): position for position in range(len(requests))}
        try:
            for request_id, request in zip(waiting, requests, strict=True):
                self.llm.add_request(request_id, _prompt(request), request.params)
            while waiting:
                with self._ranks_alive():
                    outputs = self.llm.step()
                for output in outputs:
                    if output.finished:
                        yield waiting.pop(output.request_id), output
        finally:
            if waiting:
                self.llm.abort_request(list(waiting))
            self._drain()

    def _drain(self) -> None:
        """Finish the batch that vLLM's asynchronous scheduling, which it uses on GPUs, has started in advance.

        Otherwise its result would be read after the next action, such as a refit.
        """
        while self.llm.engine_core.engine_core.batch_queue:
            with self._ranks_alive():
                self.llm.step()

    def rpc(self, method: str, *arguments: Any) -> list[Any]:
        with self._ranks_alive():
            return self.llm.collective_rpc(method, self.timeout, arguments)

    def reset_prefix_cache(self) -> bool:
        return self.llm.reset_prefix_cache()

    def take_block_counts(self) -> tuple[int, int, int]:
        from nemo_fp8rl.generation.kv_window.spec import take_block_counts

        return take_block_counts()

    def pause(self, recompute: bool) -> None:
        raise NotImplementedError("the thread that would pause this core is the one that steps it")

    def resume(self, version: int) -> None:
        raise NotImplementedError("this core does not pause")

    def check_health(self) -> None:
        with self._ranks_alive():
            self.llm.model_executor.check_health()

    def shutdown(self) -> None:
        if self.has_rank_processes:
            self.llm.engine_core.shutdown()
        else:
            vllm_compat.end_engine(self.llm)
        del self.llm

    @contextmanager
    def _ranks_alive(self) -> Iterator[None]:
        """Raise WorkerDied for what vLLM raises when one of its processes ended, or did not answer in time."""
        try:
            yield
        except Exception as error:
            if getattr(self.llm.model_executor, "is_failed", False):  # only of an executor with processes
                raise WorkerDied("a process of its ranks ended") from error
            # an error of the rank itself arrives as a RuntimeError
            if self.has_rank_processes and isinstance(error, TimeoutError):
                raise WorkerDied(f"its ranks hang: {error}") from error
            raise


class AsyncCore:
    """vLLM's AsyncLLM on an event loop in a thread of its own.

    timeout:    seconds without an answer after which the engine counts as dead; longer where answers are long
    is_paused:  True from `pause` to `resume`; this time counts for no answer
    """

    def __init__(self, arguments: dict[str, Any], timeout: float) -> None:
        self.timeout, self.is_shut_down, self.is_paused = timeout, False, False
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name=ENGINE_THREAD, daemon=True).start()
        self.llm: Any = None
        try:
            self.llm = self._wait(_start_async_llm(arguments))
            self.rpc("nemo_fp8rl_end_with", os.getpid())
        except BaseException:
            self._loop.call_soon_threadsafe(self._loop.stop)
            raise
        self._ids = count()

    def stream(self, requests: Sequence[Request]) -> Iterator[tuple[int, Any]]:
        outputs: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        generating = self._submit(self._generate(requests, outputs))
        longest = max((request.params.max_tokens for request in requests), default=0)
        timeout = self.timeout + SECONDS_A_TOKEN * longest
        try:
            for _ in requests:
                position, output = self._next(outputs, timeout)
                if isinstance(output, Exception):
                    raise _death(output)
                yield position, output
        finally:
            generating.cancel()

    def _next(self, outputs: queue.SimpleQueue[tuple[int, Any]], timeout: float) -> tuple[int, Any]:
        waited, now = 0.0, time.monotonic()
        while True:
            with suppress(queue.Empty):
                return outputs.get(timeout=1.0)
            if self.is_shut_down:  # by another thread; the loop may never have started this coroutine
                raise WorkerDied("the engine was shut down")
            before, now = now, time.monotonic()
            waited += 0.0 if self.is_paused else now - before
            if waited > timeout:
                raise WorkerDied(f"no answer complete in {timeout:g} seconds")

    def rpc(self, method: str, *arguments: Any) -> list[Any]:
        return self._wait(self.llm.collective_rpc(method, args=arguments))

    def reset_prefix_cache(self) -> bool:
        return self._wait(self.llm.reset_prefix_cache())

    def take_block_counts(self) -> tuple[int, int, int]:
        peaks, kept, dense = zip(*self.rpc("nemo_fp8rl_take_block_counts"), strict=True)
        return max(peaks), sum(kept), sum(dense)

    def pause(self, recompute: bool) -> None:
        self.is_paused = True
        self._wait(self.llm.pause_generation(mode="keep", clear_cache=recompute))

    def resume(self, version: int) -> None:
        self._wait(self.llm.update_weight_version(str(version)))
        self._wait(self.llm.resume_generation())
        self.is_paused = False

    def check_health(self) -> None:
        self._wait(self.llm.check_health())

    def shutdown(self) -> None:
        self._submit(self._stop()).result()
        self.is_shut_down = True
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _stop(self) -> None:
        self.llm.shutdown()
        other_tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in other_tasks:
            task.cancel()
        await asyncio.gather(*other_tasks, return_exceptions=True)

    async def _generate(self, requests: Sequence[Request], outputs: queue.SimpleQueue[tuple[int, Any]]) -> None:
        async def generate(position: int, request: Request) -> None:
            try:
                async for output in self.llm.generate(_prompt(request), request.params, str(next(self._ids))):
                    outputs.put((position, output))
            except asyncio.CancelledError:  # by `shutdown`, or because the caller stopped reading
                outputs.put((position, WorkerDied("the engine was shut down")))
                raise
            except Exception as error:
                outputs.put((position, error))

        await asyncio.gather(*(generate(position, request) for position, request in enumerate(requests)))

    def _submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Return the coroutine's result. A core that has just ended may never answer, so its state is polled."""
        submitted, deadline = self._submit(coroutine), time.monotonic() + self.timeout
        while not wait([submitted], timeout=1.0).done:
            if self.llm is not None and self.llm.errored:
                raise WorkerDied("the process of its core ended")
            if self.is_shut_down:
                raise WorkerDied("the engine was shut down")
            if time.monotonic() > deadline:
                raise WorkerDied(f"no answer in {self.timeout:g} seconds")
        try:
            return submitted.result()
        except Exception as error:
            raise _death(error) from None


def sampling_params(sampling: Sampling, max_tokens: int, seed: int) -> Any:
    """Return vLLM's SamplingParams for a prompt.

    max_tokens:  tokens of its answer, at most
    seed:        of the prompt; its samples derive theirs from it
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=sampling.num_generations if sampling.temperature else 1,  # vLLM refuses n > 1 for greedy answers
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k or 0,  # 0: all
        max_tokens=max_tokens,
        logprobs=0 if sampling.logprobs else None,
        stop_token_ids=list(sampling.stop_token_ids),
        stop=list(sampling.stop_strings),
        include_stop_str_in_output=True,
        seed=seed,
        detokenize=bool(sampling.stop_strings),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _prompt(request: Request) -> Any:
    salt = {"cache_salt": request.cache_salt} if request.cache_salt else {}
    return {"prompt_token_ids": list(request.token_ids), **salt}


async def _start_async_llm(arguments: dict[str, Any]) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    with _block_interrupts():
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), usage_context=UsageContext.LLM_CLASS)


@contextmanager
def _block_interrupts() -> Iterator[None]:
    """Processes started in the block ignore Ctrl-C, which this process handles: they inherit this thread's mask."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _death(error: Exception) -> Exception:
    """Return a WorkerDied where vLLM reports that its core is gone, else the error itself."""
    from vllm.v1.engine.exceptions import EngineDeadError

    return WorkerDied("the process of its core ended") if isinstance(error, EngineDeadError) else error
