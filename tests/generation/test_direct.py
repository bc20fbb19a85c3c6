"""A trainer rank writes the weights into the memory of a real engine in another process."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.generation.pair import GREEDY, Pair, outputs, tiny_pair

FAMILIES = ["qwen3", pytest.param("qwen3_moe", marks=pytest.mark.long)]


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory) -> Iterator[Pair]:
    pair = tiny_pair(
        tmp_path_factory.mktemp(request.param) / "tiny",
        request.param,
        "nemo_fp8rl.refit.mode=full",
        "policy.generation.vllm_cfg.async_engine=true",
    )
    yield pair
    pair.close()


def shared_files(process: int | str = "self") -> list[str]:
    lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    return [line for line in lines if "/memfd:nemo_fp8rl" in line]


def inodes(process: int | str = "self") -> set[str]:
    return {line.split()[4] for line in shared_files(process)}


def test_after_refits_in_place_it_is_a_fresh_engine(pair, tmp_path):
    assert pair.bridge.description == "full through mapped memory, direct, verify digest"
    pair.is_fresh_after_refits(tmp_path)
    assert pair.refit().direct > 0.5  # the rest is what vLLM repacks
    assert pair.mismatch() < pair.limit


def test_what_was_written_is_what_is_sent_again(pair):
    pair.bridge.verify = "full"
    try:
        pair.train(1)
        report = pair.refit()
        assert (report.retries, report.direct > 0.5) == (0, True)
    finally:
        pair.bridge.verify = "digest"


def test_an_engine_that_was_killed_is_started_in_new_memory(pair):
    for _ in range(2):
        pair.refit()
    expected = outputs(pair.generate(GREEDY), same_batches=False)
    engine = next(p for p in psutil.Process().children(recursive=True) if shared_files(p.pid))
    mapped, of_engine = inodes(), inodes(engine.pid)
    assert of_engine and of_engine <= mapped
    engine.kill()
    report = pair.refit()
    assert report.retries == 1
    pair.engine = pair.generation.engines.worker
    pair.refit()
    assert pair.refit().direct > 0.5
    assert len(inodes()) == len(mapped)
    assert inodes().isdisjoint(of_engine)
    assert outputs(pair.generate(GREEDY), same_batches=False) == expected


def test_an_engine_that_drops_its_weights_gives_their_memory_back(pair):
    for _ in range(2):
        pair.refit()
    expected = outputs(pair.generate(GREEDY), same_batches=False)
    engine = next(p for p in psutil.Process().children(recursive=True) if shared_files(p.pid))
    before = engine.memory_info().shared
    assert pair.engine.finish_generation(2) > 0
    assert engine.memory_info().shared < before
    pair.engine.prepare_for_generation()
    for _ in range(2):
        assert pair.refit().direct == 0.0
        assert outputs(pair.generate(GREEDY), same_batches=False) == expected
