"""Where metrics go: the real TensorBoard, and the real W&B (offline) and MLflow (SQLite) where they are installed."""

import json
import os
import signal
import sqlite3
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import pytest

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.run.directory import RunDirectory
from tests.run.test_directory import FakePolicy

METRICS = {"train/reward": 0.25, "train/gen_kl_error": 1e-6, "train/gen_kl_error/position_2_3": 1e-7, "refit/bytes": 9}
"""One name begins with another, as a folder's does."""
has_wandb = pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed: make test-loggers")
has_mlflow = pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow is not installed: make test-loggers")


def leave_run(cfg, resume: bool, first: int, last: int) -> None:
    with RunDirectory(cfg, resume) as run:
        for step in range(first, last + 1):
            run.log(step, METRICS | {"train/reward": step / 10})
            if step == 2:
                run.save_checkpoint(step, FakePolicy())


@pytest.mark.parametrize("package", ["wandb", "mlflow"])
def test_a_logger_whose_package_is_missing_is_refused(recipe, monkeypatch, package):
    """Also where the working directory has a folder of its name, as W&B leaves one: Python takes it for a package."""
    cfg = recipe(f"logger.{package}_enabled=true")
    folder = Path(cfg.logger.log_dir).parent / "elsewhere"
    (folder / package).mkdir(parents=True)
    monkeypatch.setattr("sys.path", [str(folder)])
    monkeypatch.delitem(sys.modules, package, raising=False)
    assert find_spec(package) is not None
    with pytest.raises(UserError, match=rf"logger\.{package}_enabled=true needs .*: pip install {package}"):
        RunDirectory(cfg, resume=False)
    assert not Path(cfg.logger.log_dir).exists()


def test_a_password_in_the_trackers_address_is_not_kept(recipe):
    """The recipe itself is refused: a launcher's script would show it before any run begins."""
    with pytest.raises(UserError, match="MLFLOW_TRACKING_PASSWORD in the environment") as refused:
        recipe("logger.mlflow.tracking_uri=https://bob:S3cr3t@mlflow.example")
    assert "S3cr3t" not in str(refused.value)


@pytest.mark.parametrize("text", [b"{", b"[1]", b'{"wandb": 3}', b"\xff"])
def test_names_of_a_run_that_cannot_be_read_are_named(recipe, text):
    leave_run(recipe(), False, 1, 2)
    (Path(recipe().logger.log_dir) / "trackers.json").write_bytes(text)
    with pytest.raises(UserError, match=r"trackers\.json .*; remove it, and the trackers begin anew"):
        leave_run(recipe(), True, 3, 3)


def test_tensorboard_has_the_names_of_metrics_jsonl(recipe):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    cfg = recipe("logger.tensorboard_enabled=true")
    leave_run(cfg, False, 1, 3)
    events = EventAccumulator(f"{cfg.logger.log_dir}/tensorboard")
    events.Reload()
    assert set(events.Tags()["scalars"]) == set(METRICS)
    assert [(event.step, event.value) for event in events.Scalars("train/reward")] == [
        (step, pytest.approx(step / 10)) for step in (1, 2, 3)
    ]


def test_tensorboard_has_each_step_once_after_a_restart_without_a_checkpoint(recipe):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    cfg = recipe("logger.tensorboard_enabled=true")
    for last in (4, 2):
        with RunDirectory(cfg, resume=False, restartable=True) as run:
            for step in range(last + 1):
                run.log(step, METRICS)
    events = EventAccumulator(f"{cfg.logger.log_dir}/tensorboard")
    events.Reload()
    assert [event.step for event in events.Scalars("train/reward")] == [0, 1, 2]


def test_tensorboard_goes_on_after_the_checkpoint(recipe):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    cfg = recipe("logger.tensorboard_enabled=true")
    leave_run(cfg, False, 1, 4)
    leave_run(cfg, True, 3, 3)
    events = EventAccumulator(f"{cfg.logger.log_dir}/tensorboard")
    events.Reload()
    assert [event.step for event in events.Scalars("train/reward")] == [1, 2, 3]


def wandb_history(file: Path) -> list[dict[str, float]]:
    """The rows of an offline run's file: a LevelDB log of protobufs behind a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts, rows = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        room = 2**15 - at % 2**15
        if room < 7:  # the end of a block
            at += room
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record, parts = Record.FromString(parts), b""
            if record.WhichOneof("record_type") == "history":
                items = ((item.key or "/".join(item.nested_key), item.value_json) for item in record.history.item)
                rows.append({name: json.loads(value) for name, value in items if not name.startswith("_")})
    return rows


@pytest.fixture
def end_wandb(monkeypatch) -> Iterator[Callable[[], None]]:
    """Offline and silent. end_wandb() ends its process, which only then has surely written the file, and which keeps
    the settings of its first run.
    """
    import wandb

    wandb.teardown()
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield wandb.teardown
    wandb.teardown()


@has_wandb
def test_wandb_has_the_names_and_goes_on_when_resumed(recipe, end_wandb):
    cfg = recipe("logger.wandb_enabled=true", "logger.wandb.project=tiny", "logger.wandb.name=one")
    folder = Path(cfg.logger.log_dir)
    leave_run(cfg, False, 1, 3)
    end_wandb()
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    assert wandb_history(file) == [METRICS | {"train/reward": step / 10, "step": step} for step in (1, 2, 3)]
    leave_run(cfg, True, 3, 4)
    end_wandb()
    files = set(folder.glob("wandb/offline-run-*/*.wandb"))
    assert {path.name for path in files} == {file.name}  # one run, by its id
    rows = [row for path in files - {file} for row in wandb_history(path)]
    assert [row["step"] for row in rows] == [3, 4]


@has_wandb
def test_wandb_without_an_account_is_refused_in_a_sentence(recipe, end_wandb, monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with (
        pytest.raises(UserError, match=r"logger\.wandb_enabled: .*`wandb login`, or set WANDB_MODE=offline"),
        RunDirectory(recipe("logger.wandb_enabled=true"), resume=False),
    ):
        pass


@has_wandb
def test_wandb_that_breaks_in_a_run_is_said_once_and_costs_nothing_else(recipe, end_wandb):

    with RunDirectory(recipe("logger.wandb_enabled=true"), resume=False) as run:
        run.log(1, METRICS)
        children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
        core = next(int(c) for c in children if "wandb-core" in Path(f"/proc/{c}/cmdline").read_text())
        os.kill(core, signal.SIGKILL)
        os.waitpid(core, 0)
        with pytest.warns(UserWarning, match=r"Weights & Biases took nothing from step \d on .*metrics\.jsonl") as said:
            for step in range(2, 9):
                run.log(step, METRICS)
                time.sleep(0.1)  # its connection ends on another thread
        assert len(said) == 1
    assert [row["step"] for row in run.read_metrics()] == [*range(1, 9)]
    with pytest.raises(ConnectionResetError):
        end_wandb()


@pytest.fixture
def mlflow_database(tmp_path) -> str:
    return f"sqlite:///{tmp_path}/mlflow.db"


@has_mlflow
def test_mlflow_has_the_names_and_goes_on_when_resumed(recipe, mlflow_database):
    from mlflow import MlflowClient

    keys = ("experiment_name=tiny", "run_name=one", f"tracking_uri={mlflow_database}")
    cfg = recipe("logger.mlflow_enabled=true", *(f"logger.mlflow.{key}" for key in keys))
    leave_run(cfg, False, 1, 3)
    leave_run(cfg, True, 3, 4)
    client = MlflowClient(mlflow_database)
    (run,) = client.search_runs([client.get_experiment_by_name("tiny").experiment_id])
    assert (run.info.run_name, run.info.status) == ("one", "FINISHED")
    assert set(run.data.metrics) == set(METRICS)
    assert run.data.params["nemo_fp8rl.flow"] == "fp8_e2e"
    assert len(run.data.params) > 100
    history = {(point.step, point.value) for point in client.get_metric_history(run.info.run_id, "train/reward")}
    assert history == {(step, step / 10) for step in (1, 2, 3, 4)}


@has_mlflow
def test_mlflow_that_cannot_be_reached_is_refused(recipe, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    cfg = recipe("logger.mlflow_enabled=true", "logger.mlflow.tracking_uri=http://127.0.0.1:9")
    for _ in range(2):  # the run directory is free again
        with (
            pytest.raises(UserError, match=r"logger\.mlflow\.tracking_uri=http://127\.0\.0\.1:9: MLflow cannot be"),
            RunDirectory(cfg, resume=False),
        ):
            pass


@has_mlflow
@pytest.mark.parametrize("uri", ["mysql+nodriver://host/database", "sqlite:////dev/null/mlflow.db", "none://x"])
def test_mlflow_whose_database_cannot_be_opened_is_refused(recipe, uri):
    cfg = recipe("logger.mlflow_enabled=true", f"logger.mlflow.tracking_uri={uri}")
    with pytest.raises(UserError, match=r"MLflow cannot be reached \(.*\); mend it"), RunDirectory(cfg, resume=False):
        pass


@has_mlflow
def test_mlflow_in_folders_is_refused(recipe, monkeypatch, tmp_path):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for uri in (f"file:{tmp_path}/mlruns", f"{tmp_path}/mlruns"):
        cfg = recipe("logger.mlflow_enabled=true", f"logger.mlflow.tracking_uri={uri}")
        with pytest.raises(UserError, match="a folder cannot hold"), RunDirectory(cfg, resume=False):
            pass


@has_mlflow
def test_mlflow_that_breaks_in_a_run_is_said_once_and_costs_nothing_else(recipe, mlflow_database, tmp_path):
    cfg = recipe("logger.mlflow_enabled=true", f"logger.mlflow.tracking_uri={mlflow_database}")
    with RunDirectory(cfg, resume=False) as run:
        run.log(1, METRICS)
        with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
            database.execute("DROP TABLE metrics")
        with pytest.warns(UserWarning, match=r"MLflow took nothing from step 2 on .*metrics\.jsonl has all") as said:
            run.log(2, METRICS)
            run.log(3, METRICS)
        assert len(said) == 1
    assert [row["step"] for row in run.read_metrics()] == [1, 2, 3]
