"""Loggers beside metrics.jsonl, with the same names of metrics: TensorBoard, Weights & Biases, MLflow.

The last two are optional packages. When a run is resumed, their runs continue: trackers.json in the run directory has
their ids.
"""

import json
import secrets
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from nemo_fp8rl.common.atomic_files import write_atomically
from nemo_fp8rl.common.errors import UserError, single_line
from nemo_fp8rl.config.run_schema import LoggerConfig, MlflowConfig, WandbConfig

PACKAGES = ("tensorboard", "wandb", "mlflow")
IDS = "trackers.json"
MAX_PARAMS = 100
"""MLflow's servers accept at most so many parameters per request."""


class Logger(Protocol):
    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def close(self, failed: bool) -> None:
        """failed: the run ended by an exception"""
        ...


def check_loggers(cfg: LoggerConfig) -> None:
    """Raise UserError for a logger whose package is not installed."""
    for package in PACKAGES:
        key = f"{package}_enabled"
        if getattr(cfg, key) and not _is_installed(package):
            raise UserError(f"logger.{key}=true needs the package {package}: pip install {package}, or set it to false")


def open_loggers(cfg: LoggerConfig, recipe: dict[str, Any], completed_steps: int) -> Iterator[Logger]:
    """Open and yield the loggers that `cfg` enables, one by one.

    recipe:           flat, for the trackers' tables
    completed_steps:  the step after which a resumed run continues; 0 for a new run
    Raises:           UserError where a tracker cannot be reached
    """
    folder = Path(cfg.log_dir)
    ids = _read_ids(folder / IDS) if completed_steps else {}
    if cfg.tensorboard_enabled:
        yield TensorBoardLogger(folder, completed_steps)
    if cfg.wandb_enabled:
        ids.setdefault("wandb", secrets.token_hex(4))
        yield WandbLogger(cfg.wandb, folder, recipe, ids["wandb"])
    if cfg.mlflow_enabled:
        mlflow = MlflowLogger(cfg.mlflow, folder, recipe, ids.get("mlflow"))
        ids["mlflow"] = mlflow.run_id
        yield mlflow
    if ids:
        write_atomically(folder / IDS, json.dumps(ids) + "\n")


def _read_ids(path: Path) -> dict[str, str]:
    """Return the ids of the run at the trackers, {} without the file. Raises UserError."""
    try:
        ids = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({_shorten(error)}); remove it, and the trackers begin anew") from None
    if not isinstance(ids, dict) or not all(isinstance(number, str) for number in ids.values()):
        raise UserError(f"{path} holds no names of runs; remove it, and the trackers begin anew")
    return ids


class TensorBoardLogger:
    def __init__(self, folder: Path, completed_steps: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(
            str(folder / "tensorboard"), purge_step=completed_steps + 1 if completed_steps else 0
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def close(self, failed: bool) -> None:
        self.writer.close()


class _Tracker:
    """A tracker whose failure during a run loses only the tracker's own metrics, with one warning."""

    name: str
    is_broken = False

    def _try(self, what: str, call: Callable[[], object]) -> None:
        if self.is_broken:
            return
        try:
            call()
        except Exception as error:  # any error: a run must not end because of its tracker
            self.is_broken = True
            warnings.warn(
                f"{self.name} took nothing from {what} on ({_shorten(error)}); metrics.jsonl has all", stacklevel=3
            )


class WandbLogger(_Tracker):
    """Weights & Biases. Its files are in wandb/ in the run directory; WANDB_MODE=offline needs no network."""

    name = "Weights & Biases"

    def __init__(self, cfg: WandbConfig, folder: Path, recipe: dict[str, Any], run_id: str) -> None:
        import wandb

        try:
            self.run = wandb.init(
                project=cfg.project,
                name=cfg.name or str(folder),
                dir=str(folder),
                config=recipe,
                id=run_id,
                resume="allow",
                settings=wandb.Settings(console="off"),
            )
        except wandb.errors.Error as error:
            raise UserError(
                f"logger.wandb_enabled: Weights & Biases cannot be reached ({_shorten(error)}); log in with "
                "`wandb login`, or set WANDB_MODE=offline"
            ) from None
        self.run.define_metric("*", step_metric="step")  # a resumed run logs the steps after its checkpoint again

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._try(f"step {step}", lambda: self.run.log({**metrics, "step": step}))

    def close(self, failed: bool) -> None:
        self._try("the end", lambda: self.run.finish(exit_code=int(failed)))


class MlflowLogger(_Tracker):
    name = "MLflow"

    def __init__(self, cfg: MlflowConfig, folder: Path, recipe: dict[str, Any], run_id: str | None) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        try:
            self.client = MlflowClient(tracking_uri=cfg.tracking_uri)
            _refuse_folders(self.client.tracking_uri)
            if run_id is None:
                experiment = self.client.get_experiment_by_name(cfg.experiment_name)
                experiment_id = (
                    experiment.experiment_id if experiment else self.client.create_experiment(cfg.experiment_name)
                )
                run_id = self.client.create_run(experiment_id, run_name=cfg.run_name or str(folder)).info.run_id
                params = [Param(key, str(value)) for key, value in recipe.items()]
                for start in range(0, len(params), MAX_PARAMS):
                    self.client.log_batch(run_id, params=params[start : start + MAX_PARAMS])
            else:
                self.client.set_terminated(run_id, "RUNNING")
        except UserError:
            raise
        except Exception as error:  # of MLflow, SQLAlchemy, a missing driver or a file
            raise UserError(
                f"logger.mlflow.tracking_uri={cfg.tracking_uri}: MLflow cannot be reached ({_shorten(error)}); "
                "mend it, or set logger.mlflow_enabled=false"
            ) from None
        self.run_id = run_id

    def log(self, step: int, metrics: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        batch = [Metric(name, float(value), now, step) for name, value in metrics.items()]
        self._try(f"step {step}", lambda: self.client.log_batch(self.run_id, metrics=batch))

    def close(self, failed: bool) -> None:
        self._try("the end", lambda: self.client.set_terminated(self.run_id, "FAILED" if failed else "FINISHED"))


def _refuse_folders(tracking_uri: str) -> None:
    """Raise UserError for MLflow's old store, which has one file per metric."""
    if urlsplit(tracking_uri).scheme in ("", "file"):
        raise UserError(
            f"logger.mlflow.tracking_uri={tracking_uri}: a folder cannot hold train/gen_kl_error beside "
            "train/gen_kl_error/position_0; give a server, or sqlite:///mlflow.db"
        )


def _is_installed(package: str) -> bool:
    """Return True for an installed package; a folder of that name in the working directory, such as W&B's, is none."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def _shorten(error: Exception) -> str:
    return single_line(error)[:200]
