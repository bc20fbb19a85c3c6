"""A real vLLM engine on CPU: refitted in place, it is the engine that was started from those weights."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_fp8rl.batch import Prompt
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.generation import engine, engine_checks
from nemo_fp8rl.generation.core import AsyncCore
from nemo_fp8rl.generation.engine import VllmEngine
from nemo_fp8rl.generation.engine_arguments import engine_arguments
from nemo_fp8rl.generation.interface import EngineDescription
from nemo_fp8rl.hf.model_config import read_hf_config
from nemo_fp8rl.refit.manifest import RefitError
from nemo_fp8rl.refit.message import Header
from nemo_fp8rl.workers import WorkerDied
from tests.conftest import ALIGNED, RECIPES
from tests.generation.pair import FREE, GREEDY, Pair, outputs
from tests.policy.sent import sent_tensors
from tests.refit.fake_gpu_reads import ScalarReads, fake_gpu_reads
from tests.refit.memory_engine import Message, Tampered

REFIT, VLLM = "nemo_fp8rl.refit", "policy.generation.vllm_cfg"
PRECISIONS = {
    "fp8_e2e": ["nemo_fp8rl.flow=fp8_e2e", f"{REFIT}.mode=delta"],
    "some_layers": [
        "policy.generation.vllm_cfg.num_first_layers_in_bf16=1",
        "policy.generation.vllm_cfg.quantization_ignored_layer_kws=[o_proj,layers.1.mlp]",
        f"{REFIT}.transport=shared_memory",
        f"{REFIT}.verify=full",
    ],
    "bf16": ["nemo_fp8rl.flow=bf16"],
    "fp8_rollout": ["nemo_fp8rl.flow=fp8_rollout", f"{REFIT}.transport=collective", f"{REFIT}.verify=off"],
}


@pytest.fixture(scope="module", params=PRECISIONS)
def pair(request, tiny_overrides) -> Iterator[Pair]:
    learning = ("policy.megatron_cfg.optimizer.lr=0.002", "policy.megatron_cfg.scheduler.lr_warmup_iters=0")
    pair = Pair(load(RECIPES / "tiny_cpu.yaml", [*tiny_overrides, *learning, *PRECISIONS[request.param]]))
    yield pair
    pair.close()


def test_generation_before_the_first_refit_is_refused(pair):
    with pytest.raises(RefitError, match="has not received weights"):
        pair.generate(GREEDY)


def test_after_one_and_after_ten_refits_it_is_a_fresh_engine(pair, tmp_path):
    pair.is_fresh_after_refits(tmp_path)


def test_its_batches_are_as_large_as_those_of_vllms_own_llm(pair):
    scheduler = pair.engine.core.llm.vllm_config.scheduler_config
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == (256, 8192)


def test_no_sequence_is_divided_among_threads(pair):
    """As vLLM does where sequences are fewer: then attention's sums would depend on who else is answered."""
    from vllm.v1.attention.backends.cpu_attn import envs

    assert not envs.VLLM_CPU_ATTN_SPLIT_KV


def test_engine_holds_the_trainers_bytes(pair):
    """Every FP8 weight and scale in the engine's memory, fused or not, is what the trainer exported, to the byte."""
    if not pair.cfg.nemo_fp8rl.quantizes_rollout:
        pytest.skip("bf16 engines repack their weights for the CPU")
    pair.refit()
    pair.train(1)
    pair.refit()
    sent = sent_tensors(pair.worker)
    (held,) = pair.engine.core.llm.apply_model(lambda model: {n: p.data.clone() for n, p in model.named_parameters()})
    fused = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    compared = 0
    for name, tensor in held.items():
        *path, module, leaf = name.split(".")
        if pair.worker.engine_fp8_layers.quantizes(".".join([*path, module])):
            parts = [sent[".".join([*path, part, leaf])] for part in fused.get(module, [module])]
            assert torch.equal(tensor.view(torch.uint8), torch.cat([p.view(torch.uint8) for p in parts]))
            compared += len(parts)
    assert compared == 2 * sum(t.dtype == torch.float8_e4m3fn for t in sent.values()) > 0


def test_trainer_and_engine_agree_on_the_engines_samples(pair):
    """NVIDIA accepts 1.03 to 1.05; aligned flows here are held to 1.001, and fp8_rollout shows what they avoid."""
    pair.refit()
    if pair.cfg.nemo_fp8rl.flow == "fp8_rollout":
        assert pair.mismatch() > 1.003
    else:
        assert pair.mismatch() < ALIGNED


def test_samples_depend_on_the_prompts_seed_alone(pair):
    pair.refit()
    everything = pair.generate(FREE)
    assert pair.generate(FREE) == everything
    half = pair.generate(FREE, prompts=pair.prompts[8:])
    for group, expected in zip(half, everything[8:], strict=True):
        assert [c.token_ids for c in group] == [c.token_ids for c in expected]


def test_answers_end_at_the_end_token_or_at_the_limit(pair):
    pair.refit()
    for group in pair.generate(FREE):
        for c in group:
            assert (c.finish_reason == "stop") == (c.token_ids[-1] == 1)
            assert len(c.logprobs) == len(c.token_ids) <= 8
            assert c.policy_version == pair.bridge.version
            assert all(logprob <= 0 for logprob in c.logprobs)


def cache_bytes(pair) -> int:
    executor = pair.engine.core.llm.model_executor
    caches = executor.driver_worker.worker.model_runner.kv_caches
    return sum({cache.untyped_storage().data_ptr(): cache.untyped_storage().nbytes() for cache in caches}.values())


def test_sleep_frees_memory_and_leaves_the_answers_as_they_were(pair):
    pair.refit()
    expected = outputs(pair.generate(GREEDY))
    cache = int(pair.cfg.policy.generation.vllm_cfg.kv_cache_memory_gib * 2**30)
    freed = pair.engine.finish_generation(1)
    assert 0.9 * cache < freed <= cache
    with pytest.raises(RuntimeError, match="sleeps"):
        pair.generate(GREEDY)
    with pytest.raises(RefitError, match="sleeps: prepare_for_generation before a refit"):
        pair.refit()
    pair.engine.prepare_for_generation()
    assert cache_bytes(pair) == 0  # till an answer is asked for: a refit has the room
    assert outputs(pair.generate(GREEDY)) == expected
    assert cache_bytes(pair) == freed
    pair.engine.finish_generation(1)
    pair.engine.prepare_for_generation()
    weights = pair.engine.finish_generation(2) - freed
    fp8 = [p for p in sent_tensors(pair.worker).values() if p.dtype == torch.float8_e4m3fn]
    assert weights > 3 * sum(p.nbytes for p in fp8)  # their bytes, and the copy in bfloat16 that is multiplied
    pair.engine.prepare_for_generation()
    with pytest.raises(RefitError, match="has not received weights"):
        pair.generate(GREEDY)
    pair.refit()
    assert outputs(pair.generate(GREEDY)) == expected


@pytest.mark.parametrize("is_in_driver_process", [True, False])
@pytest.mark.parametrize(
    ("prompt", "sampling", "said"),
    [((), GREEDY, "empty"), ((2, 3), replace(GREEDY, stop_strings=("",)), "stop")],
    ids=["empty prompt", "empty stop string"],
)
def test_a_prompt_that_vllm_does_not_take_is_not_the_engines_death(
    pair, monkeypatch, prompt, sampling, said, is_in_driver_process
):
    if pair.cfg.nemo_fp8rl.flow != "fp8_e2e":
        pytest.skip("one engine will do")
    pair.refit()
    monkeypatch.setattr(pair.engine, "has_no_tokenizer", False)
    monkeypatch.setattr(pair.engine, "is_in_driver_process", is_in_driver_process)
    with pytest.raises(UserError, match=f"vLLM refuses a request: .*{said}.*; mend"):
        pair.engine.generate([prompt], [0], sampling)
    assert pair.engine.generating_version() == pair.engine.policy_version >= 0


def test_who_asks_an_engine_that_another_thread_has_shut_down_hears_of_its_death():
    engine = VllmEngine()
    engine.policy_version = 1
    asked = engine.stream([(1, 2)], [0], GREEDY)
    with engine.readers.count_reader(engine._begin):
        engine.shutdown()
    assert engine.generating_version() == -1
    engine.policy_version = 1  # as it was when the other thread looked
    with pytest.raises(WorkerDied, match="shut down"):
        next(asked)


def test_who_waits_for_an_answer_of_a_core_that_is_shut_down_is_told_so_in_time():
    """Its loop may not have begun what was asked, and then puts nothing in the queue."""
    core = object.__new__(AsyncCore)
    core.is_shut_down = True
    with pytest.raises(WorkerDied, match="shut down"):
        core._next(SimpleQueue(), timeout=600.0)


FULL = torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 2.00 GiB.\nOf the allocated memory"
FAULT = torch.AcceleratorError, "CUDA error: an illegal memory access was encountered"


@pytest.mark.parametrize(
    ("fault", "is_in_driver_process", "told", "sentence"),
    [
        (FULL, True, UserError, r"^the engine's memory is full: .*2\.00 GiB.*; lower .*max_num_seqs .*--resume$"),
        (FULL, False, WorkerDied, r"^it failed: CUDA out of memory\. Tried"),
        (FAULT, False, WorkerDied, r"^it failed: CUDA error: an illegal memory access"),
    ],
    ids=["full-here", "full", "fault"],
)
def test_a_gpus_fault_is_the_death_of_an_engine_of_its_own_and_full_memory_ends_a_run_in_a_sentence(
    pair, monkeypatch, fault, is_in_driver_process, told, sentence
):
    """On a GPU, where torch says so; here the model does, as it is asked, and then the worker, as it is to sleep."""
    if pair.cfg.nemo_fp8rl.flow != "fp8_e2e":
        pytest.skip("one engine will do")
    pair.refit()
    expected = pair.generate(GREEDY)
    monkeypatch.setattr(pair.engine, "is_in_driver_process", is_in_driver_process)

    def fails(*_):
        error, text = fault
        raise error(text)

    pair.engine.core.llm.apply_model(lambda model: setattr(model, "failing", model.register_forward_pre_hook(fails)))
    with pytest.raises(told, match=sentence):
        pair.generate(GREEDY)
    assert pair.engine.generating_version() == -1
    pair.engine.core.llm.apply_model(lambda model: model.failing.remove())
    pair.refit()
    with monkeypatch.context() as patch, pytest.raises(told, match=sentence):
        patch.setattr("nemo_fp8rl.generation.weights.worker_extension.RefitWorkerExtension.nemo_fp8rl_sleep", fails)
        pair.engine.finish_generation(1)
    assert pair.engine.generating_version() == -1
    pair.refit()
    assert outputs(pair.generate(GREEDY)) == outputs(expected)


def test_memory_that_is_full_in_a_refit_is_a_death_and_the_engine_is_replaced(pair, monkeypatch):
    if pair.cfg.nemo_fp8rl.flow != "fp8_e2e":
        pytest.skip("one engine will do")
    from nemo_fp8rl.generation.weights import weight_store  # which imports vLLM

    pair.refit()
    expected, write, full = pair.generate(GREEDY), weight_store.VersionLoad._write, ["once"]

    def fills(loading, item) -> None:
        if full:
            full.pop()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        write(loading, item)

    def setup(engine, cfg) -> None:
        assert old() is None  # there is no memory for two
        start(engine, cfg)

    monkeypatch.setattr(weight_store.VersionLoad, "_write", fills)
    old, start = weakref.ref(pair.engine.core.llm), VllmEngine.setup
    monkeypatch.setattr(VllmEngine, "setup", setup)
    died = pair.generation.engine_restarts
    assert pair.refit().retries == 1
    pair.engine = pair.generation.engines.worker
    assert pair.generation.engine_restarts == died + 1
    assert outputs(pair.generate(GREEDY)) == outputs(expected)


def test_a_refit_within_ones_own_answers_is_refused(pair):
    """What is still to come would be of other weights than it says."""
    pair.refit()
    tokens = [prompt.token_ids for prompt in pair.prompts]
    answers = pair.generation.stream(tokens, range(len(tokens)), GREEDY)
    next(answers)
    with pytest.raises(RefitError, match=r"within the answers of `stream`: read them to their end, or close them"):
        pair.bridge.refit()
    answers.close()
    pair.refit()


def test_answers_end_where_the_context_does(pair):
    pair.refit()
    prompt = Prompt(0, "", "", (2,) * 60)
    ((completion,),) = pair.generate(replace(GREEDY, max_new_tokens=50), prompts=[prompt])
    assert len(completion.token_ids) == pair.engine.max_model_len - 60


def test_incomplete_refit_is_refused_and_a_full_one_recovers(pair):
    pair.refit()
    before = pair.generate(GREEDY)
    for name in ("model.layers.1.self_attn.k_proj.weight", "model.norm.weight", "lm_head.weight"):
        pair.refit_without(name)
    pair.refit()
    again = pair.generate(GREEDY)
    assert outputs(again) == outputs(before)


def test_fp8_halves_the_bytes_on_the_wire(pair):
    pair.refit()
    pair.engine.finish_generation(2)  # so that it is a full refit
    pair.engine.prepare_for_generation()
    report = pair.refit()
    assert not report.delta
    if pair.cfg.nemo_fp8rl.quantizes_rollout:
        assert 0.5 < report.wire_over_bf16 <= 0.505


def test_the_engine_has_our_method_where_it_is_fp8(pair):
    quantization = pair.engine.core.llm.vllm_config.model_config.quantization
    assert quantization == ("nemo_fp8rl" if pair.cfg.nemo_fp8rl.quantizes_rollout else None)


def load_as_on_a_gpu(pair, change: Callable[[Tensor], Any] = lambda payload: None) -> tuple[str, int, int, int]:
    """What the engine says to the next version, how many pieces it was of, and messages, and numbers that it read."""
    worker, seen = pair.engine.core.llm.model_executor.driver_worker.worker, []

    def look(at: int, message: Message) -> list[Message]:
        seen.append(len(Header.decode(message[0]).entries))
        change(message[1])
        return [message]

    worker.refit_links = [replace(link, end=Tampered(link.end, look)) for link in worker.refit_links]
    version = pair.bridge.version + 1
    pair.worker.start_push(version, [0], frozenset(), {"digests": True})
    with ScalarReads() as reads:
        *_, refusal = worker.nemo_fp8rl_load(version, True, False, True)
    pair.worker.finish_push()
    pair.bridge.links.disconnect(0)
    return refusal, sum(seen), len(seen), reads.count


def test_numbers_of_a_gpu_are_read_once_a_message(pair, monkeypatch):
    if pair.cfg.nemo_fp8rl.flow != "fp8_e2e" or pair.cfg.nemo_fp8rl.refit.verify != "digest":
        pytest.skip("of layers that are all written in place")
    pair.refit()
    fake_gpu_reads(monkeypatch)
    # A CPU's oneDNN has the head in a matrix of its own; its handle, read when it goes, is no number of a GPU's.
    monkeypatch.delattr("vllm._custom_ops.CPUDNNLGEMMHandler.__del__", raising=False)
    refusal, pieces, messages, reads = load_as_on_a_gpu(pair)
    assert refusal == ""
    assert pieces > messages
    assert reads == 0
    pair.refit()

    def flip(payload: Tensor) -> None:
        payload[-1] ^= 1

    refusal, *_ = load_as_on_a_gpu(pair, flip)
    assert "in the engine is not what the trainer sent" in refusal or "damaged on its way" in refusal


@pytest.mark.parametrize(
    ("capability", "cache", "backend", "eager"),
    [
        (None, "fp8", "null", True),
        ((8, 9), "auto", "null", False),
        ((8, 9), "fp8", "null", True),
        ((8, 9), "fp8", "TRITON_ATTN", False),
        ((9, 0), "fp8", "null", False),
        ((9, 0), "fp8", "flashinfer", True),
        ((10, 0), "auto", "null", False),
        ((10, 0), "auto", "FLASHINFER", False),
        ((10, 3), "fp8", "null", True),
        ((12, 0), "fp8", "null", True),
    ],
)
def test_an_engine_has_graphs_on_a_gpu_unless_they_would_keep_scales(
    recipe, monkeypatch, capability, cache, backend, eager
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    keys = (f"{VLLM}.kv_cache_dtype={cache}", f"{VLLM}.attention_backend={backend}")
    assert engine_arguments(recipe(*keys), "dummy")["enforce_eager"] is eager
    asked = recipe(*keys, f"{VLLM}.enforce_eager={str(not eager).lower()}")
    assert engine_arguments(asked, "dummy")["enforce_eager"] is not eager


@pytest.mark.parametrize("backend", ["FLASHINFER", "TRITON_FLASHINFER"])
def test_graphs_that_would_keep_the_first_scales_are_refused(recipe, monkeypatch, backend):
    """FlashInfer's attention is on GPUs alone: here an engine that is none says that it has it."""
    ended = []
    monkeypatch.setattr(engine_checks, "_check_cpu", lambda hf, cfg: None)
    chosen = EngineDescription(frozenset({f"attention: {backend}"}), frozenset())
    monkeypatch.setattr(VllmEngine, "describe", lambda self: chosen)
    monkeypatch.setattr(engine, "SteppedCore", lambda *_: SimpleNamespace(shutdown=lambda: ended.append(True)))
    ways = r"set policy\.generation\.vllm_cfg\.enforce_eager=true, or attention_backend=TRITON_ATTN"
    with pytest.raises(UserError, match=rf"kv_cache_dtype=fp8: .*keep the scales .*{ways}"):
        VllmEngine().setup(recipe(f"{VLLM}.kv_cache_dtype=fp8", f"{VLLM}.enforce_eager=false"))
    assert ended


def test_an_attention_backend_goes_to_vllm_by_the_name_that_it_has_there(recipe, monkeypatch):
    assert engine_arguments(recipe(), "dummy")["attention_backend"] is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert engine_arguments(recipe(f"{VLLM}.attention_backend=triton_attn"), "dummy")["attention_backend"] == (
        "TRITON_ATTN"
    )


def test_an_attention_backend_that_vllm_does_not_have_is_refused_before_it_starts(recipe, monkeypatch):
    monkeypatch.setattr(engine_checks, "_check_cpu", lambda hf, cfg: None)
    monkeypatch.setattr(engine, "SteppedCore", None)
    with pytest.raises(UserError, match=r"attention_backend=TRITON: vLLM \S+ has none of this name; .*TRITON_ATTN"):
        VllmEngine().setup(recipe(f"{VLLM}.attention_backend=TRITON"))


@pytest.mark.parametrize(("backend", "refused"), [("TRITON_ATTN", True), ("cpu_attn", False)])
def test_a_cpu_has_one_attention_backend(recipe, backend, refused):
    cfg = recipe(f"{VLLM}.attention_backend={backend}")
    told = pytest.raises(UserError, match=r"attention_backend=TRITON_ATTN: on a CPU .*CPU_ATTN alone; leave it out")
    with told if refused else nullcontext():
        engine_checks.check_machine(read_hf_config(cfg.policy.model_name), cfg)


def test_engines_on_a_gpu_that_would_not_clamp_are_refused(recipe, monkeypatch):
    cfg = recipe("nemo_fp8rl.flow=nvfp4_e2e", "nemo_fp8rl.fp4.clamp_quantile=0.99")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UserError, match=r"nemo_fp8rl\.fp4\.clamp_quantile=0\.99: .* set it to null"):
        engine_checks.check_machine(read_hf_config(cfg.policy.model_name), cfg)


def test_greedy_answers_to_one_prompt_are_alike(pair):
    """vLLM gives one, and refuses to be asked for more."""
    pair.refit()
    one, three = (pair.generate(replace(GREEDY, num_generations=n)) for n in (1, 3))
    assert [len(group) for group in three] == [3] * len(one)
    assert outputs(three) == outputs([group * 3 for group in one])
