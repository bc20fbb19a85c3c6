"""The log directory of NeMo RL's loop as a `Run`: TensorBoard's events, and the JSON files of training batches.

NeMo RL writes to logger.log_dir/exp_001, exp_002 and so on, one folder for each start of a run:

    tensorboard/events.out.tfevents.*     metrics; a folder in it has the recipe, as hyperparameters
    train_data_step1.jsonl, ...           one sample of the step's batch per line, with log-probs of all its tokens
    wandb/, mlflow/, swanlab/             what other loggers keep there; their metrics cannot be read here
"""

import json
import logging
import math
import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemo_fp8rl.algorithms.importance_bins import EDGES, Bin
from nemo_fp8rl.algorithms.metric_names import is_measured
from nemo_fp8rl.commands.report.run_data import MAX_COUNT, Run, describe_progress
from nemo_fp8rl.common.errors import UserError, single_line
from nemo_fp8rl.run.step_log import Sample

EVENTS = "events.out.tfevents.*"
BATCH = re.compile(r"train_data_step(\d{1,15})\.jsonl")
OTHER_LOGGERS = ("wandb", "mlflow", "swanlab")
MAX_BATCHES, MAX_BYTES = 4, 64_000_000
"""The report reads at most so many files of batches, none larger than this: those of long answers have gigabytes."""
MAX_CHARACTERS = 2000

Columns = dict[str, Any]


def find_experiments(folder: Path) -> list[Path]:
    """Return the folders exp_001, ... of a log_dir, in order."""
    return sorted(path for path in folder.glob("exp_*") if path.is_dir())


def has_log(folder: Path) -> bool:
    return bool(find_events(folder) or find_batches(folder) or _other_loggers(folder))


def find_events(folder: Path) -> Path | None:
    """Return the folder of TensorBoard's events: this one, or tensorboard/ in it."""
    return next((path for path in (folder, folder / "tensorboard") if any(path.glob(EVENTS))), None)


def find_batches(folder: Path) -> dict[int, Path]:
    """Return the files of training batches by step."""
    found = {path: BATCH.fullmatch(path.name) for path in folder.glob("train_data_step*.jsonl")}
    return {int(match[1]): path for path, match in sorted(found.items()) if match}


def read_nemo_rl_log(folder: Path, name: str) -> Run:
    """Return the run. Raises UserError without TensorBoard's events, and on files that cannot be read."""
    events, batches = find_events(folder), find_batches(folder)
    if events is None:
        others = [logger for logger in OTHER_LOGGERS if (folder / logger).is_dir()]
        owner = f"its metrics are with {', '.join(others)}" if others else "it has no metrics"
        raise UserError(
            f"{folder} has no TensorBoard events ({owner}), and the report reads nothing else of NeMo RL's logs; "
            "start the run with logger.tensorboard_enabled=true"
        )
    metrics, config, omitted = _read_events(events)
    missing = []
    if omitted:
        missing.append(f"{name}: values of TensorBoard that are no finite numbers are left out, {omitted} of them")
    if not config:
        missing.append(f"{name} has no hyperparameters in TensorBoard's events (the recipe)")
    samples, log_weights = {}, {}
    steps = _choose_steps(batches)
    for step in steps:
        rows = [*_read_batch(batches[step])]
        samples[step], log_weights[step] = _pick_samples(rows, step), _count_weights(rows)
    if not batches:
        missing.append(f"{name} has no train_data_step*.jsonl (answers and importance weights)")
    elif not steps:
        missing.append(f"{name}: no train_data_step*.jsonl is small enough to be read (answers and importance weights)")
    elif len(steps) < len(batches):
        missing.append(f"{name}: answers and importance weights are those of steps {', '.join(map(str, steps))}")
    if steps:
        missing.append(f"{name}: its log has no texts of tokens, so that an answer is coloured as a whole")
    missing.append(f"{name}: TensorBoard keeps seven digits, so that a value within 6e-8 of 1 counts as 1")
    return Run(
        name=name,
        config=config,
        environment={},
        metrics=metrics,
        log_weights=log_weights,
        samples=samples,
        missing_data=missing,
        state=describe_progress(metrics, config.get("grpo.max_num_steps"), "ended or going on,"),
    )


def _other_loggers(folder: Path) -> bool:
    return any((folder / logger).is_dir() for logger in OTHER_LOGGERS)


def _read_events(folder: Path) -> tuple[list[dict[str, float]], dict[str, Any], int]:
    """Return a row of scalars per step, the recipe, and how many values were no numbers."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        raise UserError(
            f"{folder} has TensorBoard's events, and tensorboard is not installed: pip install tensorboard"
        ) from None
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it tells of every file that a kill cut short
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    try:
        events.Reload()
    except Exception as error:  # of protobuf and of the filesystem
        raise UserError(f"{folder} cannot be read: {single_line(error)}") from None
    by_step: dict[int, dict[str, float]] = defaultdict(dict)
    omitted = 0
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            if not (is_measured(event.value) and 0 <= event.step < MAX_COUNT):
                omitted += 1
            elif not tag.startswith("ray/"):  # by seconds instead of steps
                by_step[event.step][tag] = event.value
    rows = [{"step": step, **by_step[step]} for step in sorted(by_step)]
    return rows, _read_recipe(folder), omitted


def _read_recipe(folder: Path) -> dict[str, Any]:
    """Return the hyperparameters that were logged at start, flat; {} without any."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import metadata

    for path in sorted(folder.glob(f"*/{EVENTS}")):
        events = EventAccumulator(str(path))
        events.Reload()
        try:
            content = events.PluginTagToContent(metadata.PLUGIN_NAME)[metadata.SESSION_START_INFO_TAG]
        except KeyError:
            continue
        values = metadata.parse_session_start_info_plugin_data(content).hparams
        return {key: _plain_value(values[key]) for key in sorted(values)}
    return {}


def _plain_value(value: Any) -> Any:
    """Return the number, text or boolean in a protobuf value; it knows no integers."""
    plain = getattr(value, str(value.WhichOneof("kind")))
    return int(plain) if isinstance(plain, float) and plain.is_integer() else plain


def _choose_steps(batches: dict[int, Path]) -> list[int]:
    steps = sorted(step for step, path in batches.items() if path.stat().st_size <= MAX_BYTES)
    if len(steps) > MAX_BATCHES:
        steps = [steps[round(i * (len(steps) - 1) / (MAX_BATCHES - 1))] for i in range(MAX_BATCHES)]
    return steps


def _read_batch(path: Path) -> Iterator[Columns]:
    """Yield the columns of each complete line, without the dimension of the batch. Raises UserError."""
    try:
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n")[:-1], 1):
            row = json.loads(line)
            columns = {key: value[0] if isinstance(value, list) and value else value for key, value in row.items()}
            if len({len(columns[key]) for key in ("token_loss_mask", "generation_logprobs", "prev_logprobs")}) != 1:
                raise ValueError(f"line {number} has not as many log-probs as tokens")
            yield columns
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is no batch as NeMo RL logs it ({single_line(error)}); remove it") from None


def _pairs(row: Columns) -> list[tuple[float, float]]:
    """Return (trainer's, engine's log-prob) of the generated tokens of a sample that have both."""
    columns = zip(row["token_loss_mask"], row["prev_logprobs"], row["generation_logprobs"], strict=True)
    return [(a, b) for mask, a, b in columns if mask and is_measured(a) and is_measured(b)]


def _count_weights(rows: list[Columns]) -> list[Bin]:
    edges = [None, *(float(f"{edge:.6g}") for edge in EDGES), None]
    counts = Counter(bisect_left(EDGES, a - b) for row in rows if _is_trained(row) for a, b in _pairs(row))
    return [(edges[i], edges[i + 1], counts[i]) for i in sorted(counts)]


def _is_trained(row: Columns) -> bool:
    return bool(row.get("sample_loss_mask", 1))


def _pick_samples(rows: list[Columns], step: int) -> list[Sample]:
    """Return the samples with the highest and the lowest reward, and with the largest difference, as `run.samples`."""
    if not rows:
        return []
    rewards = [row["rewards"] if is_measured(row.get("rewards")) else 0.0 for row in rows]
    distances = [max((abs(a - b) for a, b in _pairs(row)), default=0.0) for row in rows]
    chosen: dict[int, list[str]] = defaultdict(list)
    for reason, index in (
        ("highest reward", rewards.index(max(rewards))),
        ("lowest reward", rewards.index(min(rewards))),
        ("largest difference", distances.index(max(distances))),
    ):
        chosen[index].append(reason)
    return [_make_sample(rows[i], rewards[i], ", ".join(reasons), step) for i, reasons in chosen.items()]


def _make_sample(row: Columns, reward: float, reason: str, step: int) -> Sample:
    """Return the sample with its answer as one token: the log has no texts of tokens.

    The messages are those of the prompt, the last answer, and what the environment said to it, which may be "".
    """
    content = row.get("content")
    texts = (
        [str(text)[:MAX_CHARACTERS] for text in content] if isinstance(content, list) and content else [str(content)]
    )
    last = len(texts) - (2 if len(texts) > 2 else 1)
    pairs = _pairs(row)
    return Sample(
        chosen=reason,
        prompt="\n".join(texts[:last]),
        reward=reward,
        policy_version=step - 1,
        num_tokens=1,
        tokens=[texts[last]],
        prev_logprobs=[math.fsum(a for a, _ in pairs)],
        generation_logprobs=[math.fsum(b for _, b in pairs)],
    )
