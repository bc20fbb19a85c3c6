"""One vLLM engine in this process: it generates, and takes refits. The driver's side is `engine_pool.py`."""

import gc
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property
from operator import itemgetter
from threading import Lock
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

from nemo_fp8rl.batch import Completion
from nemo_fp8rl.common.errors import UserError, single_line
from nemo_fp8rl.common.machine import instructions
from nemo_fp8rl.common.vllm_version import vllm_version
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.generation import vllm_compat
from nemo_fp8rl.generation.answers.completions import completions_of
from nemo_fp8rl.generation.answers.readers import AnswerReaders
from nemo_fp8rl.generation.core import AsyncCore, Core, Request, SteppedCore, sampling_params
from nemo_fp8rl.generation.engine_arguments import GRAPHS_KEEP_SCALES, engine_arguments, is_flashinfer
from nemo_fp8rl.generation.engine_checks import check_engine, check_machine
from nemo_fp8rl.generation.interface import EngineDescription, Sampling
from nemo_fp8rl.generation.weights.peer_engine import PeerEngine, raise_first
from nemo_fp8rl.hf.fp8_layers import engine_fp8_layers
from nemo_fp8rl.hf.hub import checkpoint_folder
from nemo_fp8rl.hf.model_config import read_hf_config
from nemo_fp8rl.hf.shared_operations import Shapes, operation_shapes
from nemo_fp8rl.ops.alignment import choose_alignment
from nemo_fp8rl.refit.interface import Addresses
from nemo_fp8rl.refit.manifest import RefitError, TensorPart, from_json, to_json
from nemo_fp8rl.refit.reports import LoadReport
from nemo_fp8rl.refit.route_plan import Links
from nemo_fp8rl.workers import WorkerDied
from nemo_fp8rl.workers.library_environment import set_for_engine, stay_offline
from nemo_fp8rl.workers.network import check_interfaces, node_address
from nemo_fp8rl.workers.vllm_sockets import make_folder, remove_folder

PROCESS_ERRORS = (RuntimeError, Exception)
"""vLLM raises exactly these types, no subclass, when a process that it started ended with any error."""


class VllmEngine(PeerEngine):
    """One vLLM engine. Construct it without arguments, then call `setup`.

    It starts with dummy weights and refuses to generate before its first refit.

    policy_version:  the committed version from which it generates; -1 while it is fenced
    latest_version:  the last version that was committed; -1 before the first, and after the weights were dropped
    loaded_version:  the version in its memory; -1 for weights of mixed versions
    has_died:        True once it failed while it worked, until it commits a version again
    retried_prompts: prompts that a `RemoteEnginePool` asked again
    """

    def __init__(self) -> None:
        self.policy_version = self.latest_version = self.loaded_version = -1
        self.sleep_level, self.is_cache_asleep, self.has_died, self.retried_prompts = 0, False, False, 0
        self.readers, self.recording, self.in_flight, self.max_wait = AnswerReaders(), Lock(), False, 0.0
        self.shapes: Shapes | None = None
        self.has_window = False

    def setup(self, cfg: Config, load_format: str = "dummy") -> None:
        """Start vLLM. Raises UserError where this machine or vLLM cannot serve the recipe.

        load_format:  dummy: wait for a refit; auto: read the weights of policy.model_name from disk
        """
        vllm_version()
        self.in_flight, self.patience = cfg.updates_in_flight, cfg.cluster.engine_timeout_seconds
        self.max_wait = self.patience if cfg.grpo.async_grpo.enabled else 0.0  # for another thread's refit
        hf = read_hf_config(cfg.policy.model_name)
        check_engine(hf, cfg)
        check_machine(hf, cfg)
        checkpoint_folder(cfg.policy.model_name, weights=load_format != "dummy")
        checkpoint_folder(cfg.policy.tokenizer.name, "policy.tokenizer.name")
        check_interfaces()
        self.host = node_address(cfg.cluster)
        set_for_engine(torch.cuda.is_available())
        stay_offline()
        make_folder()
        logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # "Triton not available", on every CPU
        import vllm  # noqa: F401

        vllm_compat.survive_scan_of_llvmlite()
        vllm_compat.forget_rotations()
        vllm_compat.check_attention(cfg.policy.generation.vllm_cfg)
        self.records_routes = cfg.policy.router_replay.enabled and not vllm_compat.has_route_output()
        fp8, layers = engine_fp8_layers(hf, cfg), range(hf.num_hidden_layers)
        if self.records_routes and not all(fp8.quantizes(f"model.layers.{layer}.mlp.experts") for layer in layers):
            vllm_compat.check_routes_of_bf16_experts()
        self.policy_version = self.latest_version = self.loaded_version = -1 if load_format == "dummy" else 0
        self.recomputes = cfg.grpo.async_grpo.recompute_kv_cache_after_weight_updates
        if self.in_flight:
            vllm_compat.check_updates_in_flight()
        vllm_cfg = cfg.policy.generation.vllm_cfg
        self.max_model_len, self.has_window = vllm_cfg.max_model_len, vllm_cfg.kv_window is not None
        self.is_in_driver_process = cfg.cluster.backend == "in_process"
        arguments = engine_arguments(cfg, load_format)
        self.has_no_tokenizer = arguments["skip_tokenizer_init"]
        try:
            self.core: Core = (AsyncCore if vllm_cfg.async_engine else SteppedCore)(arguments, self.patience)
        except ValueError as error:  # raised by vLLM for a recipe that it cannot serve
            raise UserError(f"vLLM cannot start an engine for this recipe: {single_line(error)}") from None
        except Exception as error:
            has_processes = vllm_cfg.async_engine or vllm_cfg.tensor_parallel_size > 1
            if not has_processes or type(error) not in PROCESS_ERRORS:
                raise
            raise UserError(  # a refusal as above, or a fault
                f"vLLM cannot start the processes of an engine for this recipe: {single_line(error)[:300]}; what they "
                "wrote says why (of a Ray actor: in its worker's log)"
            ) from None
        if cfg.fp8_kv_cache and not arguments["enforce_eager"] and any(map(is_flashinfer, self.describe().kernels)):
            self.shutdown()
            raise UserError(GRAPHS_KEEP_SCALES)
        if cfg.fp8_kv_cache and load_format == "auto" and any(lacks := self.core.rpc("nemo_fp8rl_read_kv_scales")):
            self.shutdown()
            raise UserError(f"{next(filter(None, lacks))}; start with a refit, or set kv_cache_dtype=auto")
        if self.records_routes:
            self.core.rpc("nemo_fp8rl_record_routes")
        self.shapes = operation_shapes(hf, cfg) if choose_alignment(cfg.nemo_fp8rl) == "shared_ops" else None
        if self.shapes:
            self.core.rpc("nemo_fp8rl_share_log_softmax")

    def generate(
        self, prompts: Sequence[tuple[int, ...]], seeds: Sequence[int], sampling: Sampling
    ) -> list[list[Completion]]:
        """Return the completions of each prompt, in order."""
        return [group for _, group in sorted(self.stream(prompts, seeds, sampling), key=itemgetter(0))]

    def stream(
        self, prompts: Sequence[tuple[int, ...]], seeds: Sequence[int], sampling: Sampling, is_retry: bool = False
    ) -> Iterator[tuple[int, list[Completion]]]:
        """Yield (position in `prompts`, completions of that prompt) as soon as each is complete.

        Where experts are recorded, all come at the end. Several threads may ask at once where the core is a process of
        its own (`async_engine`). A prompt and its answer end where the context ends; a prompt that leaves no room for
        an answer gets empty answers with the finish_reason "length".

        is_retry:  count the prompts: a `RemoteEnginePool` had asked them of an engine that died
        Raises:    WorkerDied; `generating_version` is then -1, or a `RemoteEnginePool` would ask this engine again
        """
        self.retried_prompts += len(prompts) if is_retry else 0
        with self.readers.count_reader(self._begin, self._may_begin, self.max_wait) as version, self._errors_as_death():
            yield from self._answers(version, prompts, seeds, sampling)

    @contextmanager
    def _errors_as_death(self) -> Iterator[None]:
        """Raise WorkerDied for what a GPU or vLLM raises in the block, unless the driver runs in this process."""
        try:
            yield
        except (UserError, RefitError):
            raise
        except WorkerDied:
            self.has_died = True
            raise
        except vllm_compat.request_refusal_type() as error:
            raise UserError(
                f"vLLM refuses a request: {single_line(error)}; mend the prompt, or the stop strings that it brings"
            ) from None
        except ValueError:  # about the arguments
            raise
        except Exception as error:
            message = single_line(error)[:300] or type(error).__name__
            is_out_of_memory = "out of memory" in message  # torch's error, or vLLM's with the text of a rank's error
            if self.is_in_driver_process and not is_out_of_memory:
                raise
            self.has_died = True
            if not self.is_in_driver_process:
                raise WorkerDied(f"it failed: {message}") from None
            raise UserError(
                f"the engine's memory is full: {message}; lower policy.generation.vllm_cfg.max_num_seqs or "
                "gpu_memory_utilization, then continue with --resume"
            ) from None

    def _begin(self) -> int:
        """Return the version from which answers are generated. Raises where the engine is fenced or asleep."""
        if (version := self._version_of_answers()) < 0:
            raise RefitError("this engine has not received weights that were committed: refit before generating")
        if self.sleep_level:
            raise RuntimeError("this engine sleeps: prepare_for_generation first")
        self._wake_cache()
        return version

    def _version_of_answers(self) -> int:
        """With updates in flight answers that begin during one wait in vLLM's queue until its commit."""
        return self.latest_version if self.in_flight else self.policy_version

    def _may_begin(self) -> bool:
        return self._version_of_answers() >= 0 or "core" not in self.__dict__  # which was shut down

    def _answers(
        self, version: int, prompts: Sequence[tuple[int, ...]], seeds: Sequence[int], sampling: Sampling
    ) -> Iterator[tuple[int, list[Completion]]]:
        if (core := self.__dict__.get("core")) is None:  # another thread has ended this engine
            raise WorkerDied("the engine was shut down")
        fitting = [i for i, prompt in enumerate(prompts) if len(prompt) < self.max_model_len]
        params = [self._sampling_params(sampling, len(prompts[i]), seeds[i]) for i in fitting]
        # keys of older weights stay in the cache, for the answers in progress alone
        salt = f"version {version}" if self.in_flight and not self.recomputes else ""
        # with a window the keys of generated tokens depend on the length of the prompt
        salts = [f"{salt} prompt of {len(prompts[i])}" if self.has_window else salt for i in fitting]
        requests = [Request(prompts[i], *rest) for i, *rest in zip(fitting, params, salts, strict=True)]
        outputs: Iterable[tuple[int, Any]] = ((fitting[at], output) for at, output in core.stream(requests))
        empty = Completion((), (), "length", version)
        for i in sorted({*range(len(prompts))} - {*fitting}):
            yield i, [empty] * sampling.num_generations
        routes: dict[str, Tensor] = {}
        if self.records_routes:
            with self.recording:  # `take_routes` returns the routes of all answers
                outputs = list(outputs)
                packed, *_ = core.rpc("nemo_fp8rl_take_routes", sampling.logprobs)
                routes = load(packed)
        for i, output in outputs:
            completions = completions_of(output, version, sampling.logprobs, routes, self.in_flight)
            yield i, completions if sampling.temperature else completions * sampling.num_generations

    def stored_parts(self) -> list[Sequence[TensorPart]]:
        """Return the parts of the model's tensors that each rank stores. Raises RefitError."""
        answers = self.core.rpc("nemo_fp8rl_stored_parts")
        raise_first(refusal for _, refusal in answers)
        return [from_json(parts) for parts, _ in answers]

    def domains(self) -> list[str]:
        """Return the memory domain of each rank (`refit.transport.shared_memory.domain`)."""
        return self.core.rpc("nemo_fp8rl_domain")

    def connect(self, links: Links, addresses: Addresses, token: str, timeout: float) -> None:
        """Have every rank take its links. Raises RefitError.

        Here, at vLLM's border, routes become JSON: [source][sink] of (address or end, route).
        """
        of_sources = [
            [(address, to_json(route)) for address, route in zip(*of_source, strict=True)]
            for of_source in zip(addresses, links.routes, strict=True)
        ]
        raise_first(self.core.rpc("nemo_fp8rl_connect", of_sources, token, timeout))

    def disconnect(self) -> None:
        self.core.rpc("nemo_fp8rl_disconnect")

    def fence(self) -> int:
        """Refuse to generate until a commit, after all answers in progress are complete.

        With updates in flight answers in progress, and new ones, wait for the commit instead. Return the version in
        memory, -1 where there is no version to which a delta could be applied. Raises RefitError in an engine that
        sleeps, and without updates in flight in a thread that is itself reading answers: the rest of its answers would
        come from other weights than they say.
        """
        if self.sleep_level:
            raise RefitError("this engine sleeps: prepare_for_generation before a refit")
        if self.in_flight:
            self.core.pause(self.recomputes)
            self.policy_version = -1
            return self.loaded_version
        if self.readers.is_this_thread_reading():
            raise RefitError("a refit within the answers of `stream`: read them to their end, or close them, before it")
        self.policy_version = -1
        self.readers.wait_for_others()
        return self.loaded_version

    def load(
        self, version: int, verify: bool, compare: bool = False, with_frozen: bool = True
    ) -> LoadReport | RefitError:
        """Receive a version over the links and drop the prefix cache. The engine stays fenced until `commit`.

        A refusal is returned, not raised, so that the caller gets the results of the other engines. Any other error
        in the load, such as full memory, counts as the engine's death.

        compare: write nothing, compare what arrives with memory; the others are in `WeightStore.load`
        """
        self.policy_version = self.loaded_version = -1  # if this fails, memory holds tensors of two versions
        answers, failure = [], ""
        try:
            answers = self.core.rpc("nemo_fp8rl_load", version, verify, compare, with_frozen)
        except WorkerDied:
            raise
        except Exception as error:
            failure = single_line(error)[:300] or type(error).__name__
        if failure:  # raised here: in the handler, the error's frames would keep the weights that must go first
            self.has_died = True
            raise WorkerDied(f"refit {version} failed in it: {failure}")
        if refusals := [refusal for *_, refusal in answers if refusal]:
            return RefitError(refusals[0])
        if not self.in_flight and not self.core.reset_prefix_cache():
            return RefitError(f"refit {version}: the engine kept its prefix cache, which holds the old weights' keys")
        self.loaded_version = version
        direct, repacked, seconds, verify_seconds, _ = zip(*answers, strict=True)
        repacked_names = frozenset[str]().union(*repacked)  # an expert is stored by one rank of several
        direct_names = frozenset[str]().union(*direct) - repacked_names
        return LoadReport(version, direct_names, max(seconds), max(verify_seconds), repacked_names)

    def commit(self, version: int) -> None:
        """Generate from the loaded version from now on."""
        if self.loaded_version != version:
            raise RefitError(f"refit {version} cannot be committed: the engine has loaded {self.loaded_version}")
        self.latest_version, self.has_died = version, False  # it took a version, so it lives, if slowly
        if self.in_flight:
            self.core.resume(version)
        self.policy_version = version
        self.readers.look_again()

    def finish_generation(self, sleep_level: int) -> int:
        """Give memory back, and return the bytes.

        sleep_level:  1: the KV cache; 2: the weights as well, so that a refit must follow
        """
        before = self.sleep_level
        self.sleep_level = max(before, sleep_level)  # from now on no thread begins to read answers
        try:
            self.readers.wait_for_others()
            if sleep_level and not self.core.reset_prefix_cache():
                raise RuntimeError("the engine cannot sleep: answers are still being generated")
            self._wake_cache()  # cache and weights fall asleep together
            with self._errors_as_death():
                freed = sum(self.core.rpc("nemo_fp8rl_sleep", sleep_level))
        except BaseException:
            self.sleep_level = before
            raise
        if self.sleep_level == 2:
            self.policy_version = self.latest_version = self.loaded_version = -1
        return freed

    def prepare_for_generation(self) -> None:
        """Take the weights' memory again; after `finish_generation(2)` its content comes with the next refit.

        The KV cache's memory is taken with the next prompt, so that a refit can use it meanwhile.
        """
        with self._errors_as_death():
            self.core.rpc("nemo_fp8rl_wake", "weights")
        self.is_cache_asleep, self.sleep_level = self.is_cache_asleep or self.sleep_level > 0, 0

    def _wake_cache(self) -> None:
        if self.is_cache_asleep:
            with self._errors_as_death():
                self.core.rpc("nemo_fp8rl_wake", "kv_cache")
            self.is_cache_asleep = False

    def describe(self) -> EngineDescription:
        kernels = self.core.rpc("nemo_fp8rl_kernels")
        return EngineDescription(frozenset[str]().union(*kernels), frozenset([instructions()]), self._fingerprint)

    @cached_property
    def _fingerprint(self) -> frozenset[tuple[str, str]]:
        """The fingerprint of the shared operations on all ranks, empty where the engine computes by vLLM's."""
        if self.shapes is None:
            return frozenset()
        of_ranks = self.core.rpc("nemo_fp8rl_fingerprint", asdict(self.shapes))
        return frozenset((operation, digest) for of_rank in of_ranks for operation, digest in of_rank)

    def generating_version(self) -> int:
        """Return the version from which it generates; -1 while it takes no prompts, or once it has died."""
        return -1 if self.has_died else self._version_of_answers()

    def take_block_counts(self) -> tuple[int, int, int]:
        """Return (peak, kept, dense) blocks of the cache (`kv_window.spec.take_block_counts`); with a window."""
        return self.core.take_block_counts()

    def count_retried_prompts(self) -> int:
        """Return how many prompts copies of the pool asked again."""
        return self.retried_prompts

    def check_health(self) -> None:
        """Raise WorkerDied where a process of this engine is gone."""
        self.core.check_health()

    def shutdown(self) -> None:
        self.policy_version = self.latest_version = -1
        core = self.__dict__.pop("core", None)  # absent where setup failed
        self.readers.look_again()
        try:
            if core:
                core.shutdown()
                del core
                gc.collect()  # its modules refer to each other
                if torch.cuda.is_initialized():
                    torch.cuda.empty_cache()  # another engine may start in this process
        finally:
            remove_folder()

    def _sampling_params(self, sampling: Sampling, prompt_length: int, seed: int) -> Any:
        if sampling.stop_strings and self.has_no_tokenizer:
            raise UserError(
                f"prompts bring the stop strings {list(sampling.stop_strings)}, which an engine without a tokenizer "
                "does not see: set policy.generation.vllm_cfg.skip_tokenizer_init=false"
            )
        return sampling_params(sampling, min(sampling.max_new_tokens, self.max_model_len - prompt_length), seed)
