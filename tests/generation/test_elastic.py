"""Real vLLM engines as Ray actors that join, die and leave while prompts are asked; then the trainer dies."""

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from nemo_fp8rl.generation.elastic_engines import ElasticEngines, write_wanted
from nemo_fp8rl.workers import WorkerDied
from tests.conftest import RECIPES
from tests.generation.test_faults import ASYNC, WAVES, Run, process_of

PLACES = ("cluster.generation_engines=1", "cluster.min_generation_engines=1", "cluster.max_generation_engines=2")


def join_die_and_leave(overrides: list[str]) -> dict[str, object]:
    """One engine; another joins; the first is killed and returns; one leaves; the trainer is killed."""
    run = Run((*overrides, "cluster.backend=ray", *PLACES, ASYNC, WAVES))
    pool, folder, answers, said = run.generation, Path(tempfile.mkdtemp()), list[bool](), list[str]()
    expected = run.answers()
    actors = run.generation.engines.actors
    with ElasticEngines(pool, run.bridge) as engines:

        def ask_until(holds: Callable[[], bool]) -> None:
            deadline = time.monotonic() + 400
            while not holds():
                assert time.monotonic() < deadline, said
                answers.append(run.answers() == expected)
                said.extend(engines.follow(folder))

        def serve(*numbers: int) -> bool:
            return pool.serving_engines() == set(numbers) and not engines.joining and not engines.ending

        write_wanted(folder, run.cfg.cluster, 2)
        ask_until(lambda: serve(0, 1))
        first = process_of(actors[0])
        started = [first, *first.children(recursive=True)]
        answers.append(run.answers(first.kill) == expected)
        after_death = sorted(pool.serving_engines())
        report = run.bridge.refit()
        ask_until(lambda: serve(0, 1))
        last = process_of(actors[1])
        started += [last, *last.children(recursive=True)]
        write_wanted(folder, run.cfg.cluster, 1)
        ask_until(lambda: serve(0))
        answers.append(run.answers() == expected)
        said.extend(engines.follow(folder))
    _, alive = psutil.wait_procs(started, timeout=60)
    trainer = process_of(run.policy.ranks.actors[0])
    trainer.kill()
    trainer.wait()
    answers.append(run.answers() == expected)
    try:
        run.bridge.refit()
        refusal = ""
    except WorkerDied as death:
        refusal = str(death)
    answers.append(run.answers() == expected)
    counted = pool.metrics()
    run.close()
    return {
        "answers differ": answers.count(False),
        "after a death": after_death,
        "refit": [report.version, report.retries],
        "left over": [p.pid for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE],
        "trainer": refusal,
        "said": [" ".join(line.split()[:3]) for line in said],
        "joined with": [line.rpartition(" with ")[2] for line in said if " joined " in line],
        "restarts": counted["generation/engine_restarts"],
    }


@pytest.mark.long
def test_engines_join_die_and_leave_under_load_and_outlive_their_trainer(tiny_overrides):
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    command = [sys.executable, "-m", "tests.generation.test_elastic", *tiny_overrides]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1500, env=os.environ | token)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen == {
        "answers differ": 0,
        "after a death": [1],
        "refit": [1, 0],
        "left over": [],
        "trainer": "its process ended",
        "said": [
            "engines: 2 wanted",
            "engine 1 joined",
            "engine 0 died",
            "engine 0 joined",
            "engines: 1 wanted",
            "engine 1 left",
        ],
        "joined with": ["version 0", "version 1"],
        "restarts": 1,
    }


@pytest.mark.long
def test_a_run_takes_the_engines_that_its_operator_wants(warm_overrides, tmp_path):
    """Between two steps, from the file of `nemo-fp8rl engines`; its first metrics with two engines end the run."""
    folder, command = tmp_path / "run", [sys.executable, "-m", "nemo_fp8rl.cli"]
    keys = (*warm_overrides, "cluster.backend=ray", *PLACES, f"logger.log_dir={folder}", "grpo.max_num_steps=100000")
    keys = (*keys, "checkpointing.enabled=false", "grpo.val_period=0", "grpo.val_at_start=false")
    train = [*command, "train", "--config", str(RECIPES / "tiny_cpu.yaml"), *keys]
    log = tmp_path / "log"
    with log.open("w") as output, subprocess.Popen(train, stdout=output, stderr=subprocess.STDOUT) as running:
        try:
            until(lambda: rows(folder) != [], running)
            assert {row["generation/engines"] for row in rows(folder)} == {1}
            done = subprocess.run([*command, "engines", str(folder), "2"], check=True, capture_output=True, timeout=300)
            assert done.stdout.decode() == f"{folder} is to have 2 engines from its next step on\n"
            until(lambda: rows(folder)[-1]["generation/engines"] == 2, running)
            running.send_signal(signal.SIGTERM)
            running.wait(300)
        finally:
            running.kill()
    said = log.read_text()
    assert "engines: 2 wanted" in said and "engine 1 joined after" in said, said
    assert all(row["train/token_mult_prob_error"] < 1.001 for row in rows(folder))


def rows(folder: Path) -> list[dict[str, float]]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def until(holds: Callable[[], bool], running: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 600
    while not holds():
        assert running.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.2)


if __name__ == "__main__":
    print(json.dumps(join_die_and_leave(sys.argv[1:])))
