"""What a run directory refuses, so that nothing in it is lost or mixed."""

import errno
import json
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import pytest
import yaml

from nemo_fp8rl.common.atomic_files import write_atomically
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.common.machine import machine
from nemo_fp8rl.policy.rank_group import MegatronPolicy
from nemo_fp8rl.run.directory import RunDirectory, checkpoint_steps
from nemo_fp8rl.run.step_log import Sample, read
from nemo_fp8rl.train import train

DDP = "policy.megatron_cfg.distributed_data_parallel_config"
BF16_GRADIENTS = f"{DDP}.grad_reduce_in_fp32=false"


class FakePolicy:
    """Writes a file where a policy writes its weights."""

    def save(self, folder: Path) -> None:
        (folder / "weights").mkdir()
        (folder / "weights/model.safetensors").write_bytes(b"weights")


def leave_run(cfg, steps: int, checkpoint: int | None) -> None:
    with RunDirectory(cfg, resume=False) as run:
        for step in range(steps + 1):
            run.log(step, {"train/reward": step / 10})
            if step == checkpoint:
                run.save_checkpoint(step, FakePolicy())


def rows(cfg) -> list[dict[str, float]]:
    return [json.loads(line) for line in (Path(cfg.logger.log_dir) / "metrics.jsonl").read_text().splitlines()]


def contents(cfg) -> dict[str, bytes]:
    folder = Path(cfg.logger.log_dir)
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_resume_keeps_what_came_before_the_checkpoint(recipe):
    leave_run(recipe(), steps=7, checkpoint=5)
    with RunDirectory(recipe(), resume=True) as run:
        assert run.completed_steps == 5
    assert [row["step"] for row in rows(recipe())] == [0, 1, 2, 3, 4, 5]


def test_resume_cuts_histograms_and_samples_back_too(recipe):
    sample = Sample("highest reward", "1+1=", 1.0, 3, 1, ["2"], [None], [-0.5])
    with RunDirectory(recipe(), resume=False) as run:
        for step in range(1, 5):
            run.log(step, {"train/reward": 0.5}, [(None, -10.0, 1)], [sample] if step % 2 else None)
            if step == 2:
                run.save_checkpoint(step, FakePolicy())
    for name in ("metrics", "histograms", "samples"):
        with open(run.path / f"{name}.jsonl", "a") as file:
            file.write('{"step": 5, "tr')  # as a kill leaves it
    with RunDirectory(recipe(), resume=True) as run:
        run.log(3, {"train/reward": 0.5}, [(-0.0001, 0.0001, 7)], [sample])
    kept = {name: [row["step"] for row in read(run.path / f"{name}.jsonl")] for name in ("histograms", "samples")}
    assert kept == {"histograms": [1, 2, 3], "samples": [1, 3]}
    assert read(run.path / "histograms.jsonl")[-1] == {"step": 3, "log_weights": [[-0.0001, 0.0001, 7]]}
    assert read(run.path / "samples.jsonl")[-1] == {"step": 3, "samples": [asdict(sample)]}


def test_a_run_is_not_overwritten(recipe):
    leave_run(recipe(), steps=1, checkpoint=None)
    with pytest.raises(UserError, match="holds a run: add --resume"):
        RunDirectory(recipe(), resume=False)


def test_resume_without_a_checkpoint_loses_nothing(recipe):
    leave_run(recipe(), steps=7, checkpoint=None)
    with pytest.raises(UserError, match=r"7 steps but .* no checkpoint to continue from"):
        RunDirectory(recipe(), resume=True)
    assert len(rows(recipe())) == 8


def test_restartable_under_another_recipe_is_refused_where_the_checkpoints_are_away_too(recipe):
    leave_run(recipe(), steps=3, checkpoint=2)
    Path(recipe().checkpointing.checkpoint_dir).rename(Path(recipe().logger.log_dir).parent / "away")
    before = contents(recipe())
    other = recipe("policy.megatron_cfg.optimizer.lr=9e-4", "grpo.max_num_steps=1")
    with pytest.raises(UserError, match=r"policy\.megatron_cfg\.optimizer\.lr was .* and is now 0\.0009"):
        RunDirectory(other, resume=False, restartable=True)
    assert contents(recipe()) == before


def test_steps_without_a_checkpoint_are_set_aside_when_a_run_begins_anew(recipe, monkeypatch, capsys):
    leave_run(recipe(), steps=3, checkpoint=None)
    names = ("metrics.jsonl", "histograms.jsonl", "samples.jsonl")
    for number in (1, 2):
        before = contents(recipe())
        with RunDirectory(recipe(), resume=False, restartable=True) as run:
            run.log(number, {"train/reward": 0.5})
        kept = contents(recipe())
        assert [kept[f"{name}.before-{number}"] for name in names] == [before[name] for name in names]
        assert [row["step"] for row in rows(recipe())] == [number]
    assert len([name for name in kept if ".before-" in name]) == 6
    monkeypatch.setattr("nemo_fp8rl.train.backends", None)
    with pytest.raises(TypeError):
        train(recipe(), restartable=True)
    said = r"/run has 2 logged steps but .*/checkpoints no checkpoint: .* the old logs are kept in \*\.jsonl\.before-3"
    assert re.search(said, capsys.readouterr().out)


def test_checkpoints_of_another_run_are_not_touched(recipe, tmp_path):
    elsewhere = f"checkpointing.checkpoint_dir={tmp_path}/kept"
    leave_run(recipe(elsewhere), steps=3, checkpoint=3)
    with pytest.raises(UserError, match="holds checkpoints"):
        RunDirectory(recipe(elsewhere, f"logger.log_dir={tmp_path}/other"), resume=False)


@pytest.mark.parametrize("change", ["nemo_fp8rl.flow=bf16", "grpo.seed=7", "policy.megatron_cfg.optimizer.lr=0.5"])
def test_resume_under_another_recipe_names_the_key(recipe, change):
    leave_run(recipe(), steps=3, checkpoint=3)
    before = (Path(recipe().logger.log_dir) / "config.yaml").read_text()
    with pytest.raises(UserError, match=f"--resume: {change.split('=')[0]} was .* and is now"):
        RunDirectory(recipe(change), resume=True)
    assert (Path(recipe().logger.log_dir) / "config.yaml").read_text() == before


def test_resume_may_go_on_for_longer(recipe):
    leave_run(recipe(), steps=3, checkpoint=3)
    assert RunDirectory(recipe("grpo.max_num_steps=500", "grpo.val_period=3"), resume=True).completed_steps == 3


@pytest.mark.parametrize(
    "change",
    [
        "grpo.dynamic_sampling_max_gen_batches=20",
        "nemo_fp8rl.refit.bucket_bytes=1048576",
        "nemo_fp8rl.refit.transport=collective",
        "nemo_fp8rl.fp8_param=true",
        "policy.generation.vllm_cfg.gpu_memory_utilization=0.4",
        "policy.generation.vllm_cfg.max_num_seqs=64",
        "policy.train_micro_batch_size=32",
        "policy.logprob_batch_size=16",
        "policy.dynamic_batching.enabled=true",
    ],
)
def test_resume_takes_what_our_own_messages_ask_for(recipe, change):
    leave_run(recipe(), steps=3, checkpoint=3)
    assert RunDirectory(recipe(change), resume=True).completed_steps == 3


def test_a_recipe_of_no_run_is_not_overwritten(recipe):
    cfg = recipe()
    own = Path(cfg.logger.log_dir) / "config.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("defaults: tiny_cpu.yaml  # mine\n")
    with pytest.raises(UserError, match=r"config.yaml is of no run and would be overwritten: move it"):
        RunDirectory(cfg, resume=False)
    assert own.read_text() == "defaults: tiny_cpu.yaml  # mine\n"


@pytest.mark.parametrize("last", [2, 3])
def test_a_run_that_has_its_steps_says_so_loads_nothing_and_stays_as_it_is(recipe, last, monkeypatch, capsys):
    leave_run(recipe("grpo.max_num_steps=4"), steps=4, checkpoint=3)
    cfg = recipe(f"grpo.max_num_steps={last}", "logger.tensorboard_enabled=true")
    before = contents(cfg)
    monkeypatch.setattr("nemo_fp8rl.train.backends", None)
    assert train(cfg, resume=True)
    assert "/run has its 3 steps; raise grpo.max_num_steps above 3 for more" in capsys.readouterr().out
    assert contents(cfg) == before


def test_a_resume_that_fails_while_it_loads_keeps_the_record_of_the_run(recipe):
    with RunDirectory(recipe(), resume=False) as run:
        run.add_choices({"refit": "of the first attempt"})
        run.save_checkpoint(1, FakePolicy())
    longer = recipe("grpo.max_num_steps=500")
    before = contents(longer)
    with pytest.raises(UserError, match="no engine"), RunDirectory(longer, resume=True):
        raise UserError("no engine")
    names = ("environment.json", "config.yaml")
    assert [contents(longer)[name] for name in names] == [before[name] for name in names]
    with RunDirectory(longer, resume=True) as run:
        run.add_choices({"refit": "of the second attempt"})
    assert json.loads(contents(longer)["environment.json"])["choices"]["refit"] == "of the second attempt"
    assert b"max_num_steps: 500" in contents(longer)["config.yaml"]


def test_a_record_of_the_data_of_another_form_is_named(recipe):
    leave_run(recipe(), steps=3, checkpoint=3)
    (Path(recipe().logger.log_dir) / "environment.json").write_text('{"data": 3}')
    with pytest.raises(
        UserError, match=r"environment\.json, which has the digests of the run.s prompts, .* remove it to go on"
    ):
        RunDirectory(recipe(), resume=True)


def test_resume_under_other_data_is_refused(recipe):
    data = {"training": "1", "validation": "2"}
    with RunDirectory(recipe(), resume=False, data=data) as run:
        run.log(1, {"train/reward": 0.5})
        run.save_checkpoint(1, FakePolicy())
    assert RunDirectory(recipe(), resume=True, data=data).completed_steps == 1
    assert RunDirectory(recipe(), resume=True).completed_steps == 1
    with pytest.raises(UserError, match=r"--resume: the validation prompts are not those .*data\.train\.data_path"):
        RunDirectory(recipe(), resume=True, data=data | {"validation": "3"})
    environment = Path(recipe().logger.log_dir) / "environment.json"
    environment.write_text("{")
    with pytest.raises(
        UserError, match=r"environment\.json, which has the digests of the run.s prompts, cannot be read: .*remove it"
    ):
        RunDirectory(recipe(), resume=True, data=data)


def test_one_folder_by_two_names_is_locked_once(recipe, tmp_path):
    cfg = recipe()
    (tmp_path / "link").symlink_to(Path(cfg.logger.log_dir).absolute())
    Path(cfg.logger.log_dir).mkdir(parents=True)
    with RunDirectory(recipe(f"checkpointing.checkpoint_dir={tmp_path}/link"), resume=False) as run:
        assert run.completed_steps == 0


def test_a_run_of_before_there_was_a_key_goes_on_as_it_was(recipe):
    leave_run(recipe(), steps=3, checkpoint=3)
    stored = Path(recipe().logger.log_dir) / "config.yaml"
    lines = stored.read_text().splitlines(keepends=True)
    older = [line for line in lines if line.split(":")[0].strip() not in ("freeze_moe_router", "workers")]
    assert len(older) == len(lines) - 2
    stored.write_text("".join(older))
    assert RunDirectory(recipe(), resume=True).completed_steps == 3
    with pytest.raises(UserError, match="freeze_moe_router was False and is now True"):
        RunDirectory(recipe("policy.megatron_cfg.freeze_moe_router=true"), resume=True)


def test_a_run_of_before_there_were_formats_goes_on_with_the_native_backward(recipe):
    leave_run(recipe(), steps=3, checkpoint=3)
    stored = Path(recipe().logger.log_dir) / "config.yaml"
    tree = yaml.safe_load(stored.read_text())
    for key in ("backward", "fp4", "weight_block"):
        del tree["nemo_fp8rl"][key]
    stored.write_text(yaml.safe_dump(tree))
    assert RunDirectory(recipe(), resume=True).completed_steps == 3
    with pytest.raises(UserError, match=r"nemo_fp8rl\.backward was auto and is now high_precision"):
        RunDirectory(recipe("nemo_fp8rl.backward=high_precision"), resume=True)


def test_a_run_resumes_although_its_recipe_has_a_key_that_was_removed(recipe):
    leave_run(recipe(), steps=3, checkpoint=3)
    stored = Path(recipe().logger.log_dir) / "config.yaml"
    stored.write_text(stored.read_text() + "  kernel: cpu\n")  # nemo_fp8rl is the last block
    assert list(yaml.safe_load(stored.read_text()))[-1] == "nemo_fp8rl"
    assert RunDirectory(recipe(), resume=True).completed_steps == 3


def test_two_processes_do_not_share_a_run_directory(recipe):
    with (
        RunDirectory(recipe(), resume=False),
        pytest.raises(UserError, match="another process works in"),
        RunDirectory(recipe(), resume=False),
    ):
        pass


def test_oldest_checkpoints_are_dropped_and_leftovers_cleaned(recipe):
    cfg = recipe("checkpointing.keep_top_k=2")
    folder = Path(cfg.checkpointing.checkpoint_dir)
    with RunDirectory(cfg, resume=False) as run:
        (folder / ".partial_step_1").mkdir(parents=True)
        for step in (1, 2, 3):
            run.save_checkpoint(step, FakePolicy())
    assert sorted(path.name for path in folder.glob("*step_*")) == ["step_2", "step_3"]


def test_all_checkpoints_may_be_kept(recipe):
    cfg = recipe("checkpointing.keep_top_k=null")
    with RunDirectory(cfg, resume=False) as run:
        for step in (1, 2, 3):
            run.save_checkpoint(step, FakePolicy())
    assert len(list(Path(cfg.checkpointing.checkpoint_dir).glob("step_*"))) == 3


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(recipe, monkeypatch):
    """Files and folders, its own too."""
    synced: list[str] = []
    monkeypatch.setattr(
        "nemo_fp8rl.run.directory.sync", lambda path: synced.append(path.name) if path.exists() else None
    )
    with RunDirectory(recipe(), resume=False) as run:
        run.save_checkpoint(1, FakePolicy())
    partial = {".partial_step_1", "policy", "weights", "model.safetensors", "training_info.json"}
    assert (set(synced[:-1]), synced[-1]) == (partial, "checkpoints")


def test_the_environment_names_the_processor(recipe, monkeypatch, tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Some  CPU @ 2 GHz\nflags\t\t: fpu\n")
    monkeypatch.setattr("nemo_fp8rl.common.machine.CPUINFO", cpuinfo)
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: True)
    with RunDirectory(recipe(), resume=False) as run:
        shown = json.loads((run.path / "environment.json").read_text())["machine"]
    assert re.fullmatch(r"\w+, \d+ CPUs, Some CPU @ 2 GHz, AMX", shown)
    cpuinfo.unlink()
    for instructions in ("amx_tile", "avx512_bf16", "avx512"):
        monkeypatch.setattr(f"torch.cpu._is_{instructions}_supported", lambda: False)
    monkeypatch.setattr("platform.processor", lambda: "")
    assert re.fullmatch(r"\w+, \d+ CPUs", machine())


def test_a_metric_that_is_not_finite_is_not_written(recipe):
    with RunDirectory(recipe(), resume=False) as run, pytest.raises(ValueError, match="JSON"):
        run.log(1, {"train/loss": float("nan")})


@contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """No file of this process grows beyond `size` bytes: what a full disk looks like to whoever writes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_that_does_not_fit_leaves_the_old_one_alone(tmp_path):
    write_atomically(tmp_path / "results.json", "old")
    with files_end_at(1 << 10), pytest.raises(OSError, match="File too large"):
        write_atomically(tmp_path / "results.json", "new" * 1000)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"results.json": "old"}


@pytest.mark.parametrize("room", [1 << 16, 3 << 20], ids=["weights", "optimizer"])
def test_a_checkpoint_that_does_not_fit_loses_nothing(recipe, room):
    """A real policy: 1.6 MB of weights, then 10 MB of optimizer."""
    policy = MegatronPolicy(recipe())
    with RunDirectory(recipe(), resume=False) as run:
        with files_end_at(room), pytest.raises(UserError, match=r"step 1 could not be written.*no checkpoint yet"):
            run.save_checkpoint(1, policy)
        run.save_checkpoint(2, policy)
        with files_end_at(room), pytest.raises(UserError, match=r"step 3 could not be written.*from step 2"):
            run.save_checkpoint(3, policy)
        run.log(2, {"train/reward": 0.0})
    checkpoints = Path(recipe().checkpointing.checkpoint_dir)
    assert [path.name for path in checkpoints.glob("*step_*")] == ["step_2"]
    with RunDirectory(recipe(), resume=True) as run:
        run.load_checkpoint(policy)
        assert run.completed_steps == 2
        for steps in (
            '{"adam": 1, "schedule": Infinity}',
            '{"adam": NaN, "schedule": 2}',
            '{"adam": 1, "schedule": -1}',
        ):
            next(checkpoints.rglob("steps.json")).write_text(steps)
            with pytest.raises(
                UserError, match=r"steps\.json cannot be read .*; where it is damaged, remove .*/step_2 to"
            ):
                run.load_checkpoint(policy)
    policy.shutdown()


def test_two_runs_do_not_share_a_folder_of_checkpoints(recipe, tmp_path):
    shared = f"checkpointing.checkpoint_dir={tmp_path}/kept"
    other = RunDirectory(recipe(shared, f"logger.log_dir={tmp_path}/other"), resume=False)
    with RunDirectory(recipe(shared), resume=False) as run:
        with (
            pytest.raises(UserError, match=r"another process works in .*/kept; .*checkpointing\.checkpoint_dir"),
            other,
        ):
            pass
        run.save_checkpoint(1, FakePolicy())
    with pytest.raises(UserError, match="holds checkpoints"), other:  # it looked before there were any
        pass


@pytest.mark.parametrize("line", ["", "[1]", "null", "{}", '{"step": null}', '{"step": true}', "\0\0", "[" * 100_000])
@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
def test_a_line_that_is_no_step_is_named(recipe, name, line):
    leave_run(recipe(), steps=3, checkpoint=3)
    path = Path(recipe().logger.log_dir) / name
    path.write_text('{"step": 1}\n' + line + "\n")
    with pytest.raises(UserError, match=rf"{name}: line 2 is no step"), RunDirectory(recipe(), resume=True):
        pass
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(UserError, match=f"{name} cannot be read"), RunDirectory(recipe(), resume=True):
        pass


@pytest.mark.parametrize("text", [b"[1]", b"5", b"\xff\xfe", b"a: 2020-13-45", b"[" * 5000, b"a: &x {b: *x}"])
def test_a_recipe_of_a_run_that_cannot_be_read_is_named(recipe, text):
    leave_run(recipe(), steps=3, checkpoint=3)
    (Path(recipe().logger.log_dir) / "config.yaml").write_bytes(text)
    with pytest.raises(UserError, match=r"--resume: .*config\.yaml, the run's recipe, cannot be read"):
        RunDirectory(recipe(), resume=True)


def test_a_full_disk_ends_a_run_in_a_sentence_with_whole_lines(recipe):
    with RunDirectory(recipe(), resume=False) as run, Path("/dev/full").open("ab", buffering=0) as full:
        run.log(0, {"train/reward": 0.0})
        whole, run._metrics._file = run._metrics._file, full
        with pytest.raises(UserError, match=r"step 1 could not be written .*No space left .*; make room, there is no"):
            run.log(1, {"train/reward": 1.0})
        whole.close()
    assert [row["step"] for row in rows(recipe())] == [0]


def test_a_folder_for_checkpoints_that_cannot_be_written_ends_a_run_at_its_start(recipe, monkeypatch):
    refuse = OSError(errno.EPERM, "Operation not permitted")
    monkeypatch.setattr("nemo_fp8rl.common.atomic_files.os.rename", mock.Mock(side_effect=refuse))
    with (
        pytest.raises(UserError, match=r"cannot be written \(Operation not permitted\): allow writing there, or set"),
        RunDirectory(recipe(), resume=False),
    ):
        pass
    with RunDirectory(recipe("checkpointing.enabled=false"), resume=False):
        pass


def test_an_old_checkpoint_that_cannot_be_removed_costs_nothing(recipe, monkeypatch):
    with RunDirectory(recipe("checkpointing.keep_top_k=1"), resume=False) as run:
        run.save_checkpoint(1, FakePolicy())
        monkeypatch.setattr("nemo_fp8rl.run.directory.shutil.rmtree", lambda *_, **__: None)
        run.save_checkpoint(2, FakePolicy())
        assert checkpoint_steps(run.checkpoints) == [2]
    assert run.completed_steps == 2


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ((), "one rank"),
        (("tensor_model_parallel_size=2", "sequence_parallel=true"), "TP 2 SP"),
        (("tensor_model_parallel_size=2", "expert_tensor_parallel_size=1"), "TP 2 ETP 1"),
        (("expert_model_parallel_size=2", "expert_tensor_parallel_size=2"), "EP 2 ETP 2 DP 4"),
    ],
)
def test_a_run_keeps_how_its_model_is_split(recipe, keys, said):
    ranks = 4 if said.endswith("DP 4") else 2 if keys else 1
    split = (f"cluster.train_ranks={ranks}", "cluster.backend=ray", "policy.train_micro_batch_size=2")
    cfg = recipe(*split, *(f"policy.megatron_cfg.{key}" for key in keys))
    with RunDirectory(cfg, resume=False) as run:
        assert json.loads((run.path / "environment.json").read_text())["choices"]["layout"] == said


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ((), "float32"),
        ((BF16_GRADIENTS,), "bfloat16"),
        ((BF16_GRADIENTS, f"{DDP}.reduce_scatter_with_fp32_accumulation=true"), "bfloat16, summed in float32"),
        (("nemo_fp8rl.grad_reduce=fp8",), "float32, sent in FP8, summed in float32"),
    ],
)
def test_the_record_says_how_gradients_are_summed(recipe, keys, said):
    with RunDirectory(recipe(*keys), resume=False) as run:
        assert json.loads((run.path / "environment.json").read_text())["choices"]["gradients"] == said
