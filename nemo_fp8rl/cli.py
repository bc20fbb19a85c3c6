"""`nemo-fp8rl`: the command line. Bad input ends in one sentence and exit code 2, Ctrl-C in 130."""

import argparse
import errno
import io
import logging
import os
import select
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from nemo_fp8rl import __version__
from nemo_fp8rl.common.errors import BAD_INPUT, INTERRUPTED, UserError

if TYPE_CHECKING:
    from nemo_fp8rl.config.schema import Config

DISK_ERRORS = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENAMETOOLONG),
    *(errno.ENOTDIR, errno.EISDIR, errno.ELOOP),
}
"""Error numbers that the user can mend: permissions, disk space, file names."""
MAX_SECONDS = 86_400.0  # a day


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    _quiet_libraries()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for names that the terminal's encoding cannot show
    try:
        finished = arguments.run(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
    except UserError as error:
        print(f"nemo-fp8rl: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return BAD_INPUT
    except OSError as error:
        if isinstance(error, BrokenPipeError) and sys.stdout is not None and _is_stdout_abandoned():
            return 0
        if error.errno not in DISK_ERRORS:
            raise
        print(f"nemo-fp8rl: {error.filename or 'the output'}: {error.strerror}; give another path", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("nemo-fp8rl: interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0 if finished else arguments.unfinished


def _is_stdout_abandoned() -> bool:
    """Return True if the reader of stdout has gone, as after `| head`; further output is then dropped."""
    from nemo_fp8rl.common.display import discard_output

    poll = select.poll()
    poll.register(sys.stdout, select.POLLOUT)
    is_abandoned = any(event & select.POLLERR for _, event in poll.poll(0))
    if is_abandoned:
        discard_output(sys.stdout)
    return is_abandoned


def _quiet_libraries() -> None:
    """Hide the internal warnings of torch, Megatron, vLLM and transformers; the warnings of this package stay."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    warnings.filterwarnings("ignore", module=r"(torch|megatron|vllm|transformers)(\.|$)")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it warns if a CUDA build finds no GPU


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the words; unlike with plain argparse, key=value may also stand between and after options."""
    parser = _make_parser()
    arguments, unparsed = parser.parse_known_args(argv)
    if unknown := [word for word in unparsed if word.startswith("-") or not hasattr(arguments, "overrides")]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if unparsed:
        arguments.overrides += unparsed
    return arguments


Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="nemo-fp8rl", description="GRPO with FP8 end to end.")
    parser.add_argument("--version", action="version", version=__version__)
    parser.set_defaults(unfinished=INTERRUPTED)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    for add in (_add_runs, _add_models, _add_studies):
        add(commands)
    return parser


def _add_runs(commands: Commands) -> None:
    """Add the commands that run a recipe."""
    train = commands.add_parser("train", help="run GRPO from a recipe")
    _add_recipe(train)
    train.add_argument("--resume", action="store_true", help="continue the run in logger.log_dir")
    train.add_argument("--restartable", action="store_true", help="like --resume, but start a new run if there is none")
    train.set_defaults(run=_train)

    nemo = commands.add_parser(
        "nemo", help="run NeMo RL's GRPO loop, with the trainer and engines of this package or of NeMo RL"
    )
    nemo.add_argument(
        "--config", type=path, required=True, metavar="RECIPE", help="a NeMo RL recipe, see conf/nemo_rl/"
    )
    nemo.add_argument(
        "overrides", nargs="*", metavar="key=value", help="overrides in Hydra's grammar; +key=value adds a key"
    )
    nemo.set_defaults(run=_nemo)

    launch = commands.add_parser("launch", help="run a recipe on this machine, on SLURM or on Kubernetes")
    launch.add_argument("place", choices=("local", "slurm", "k8s"), metavar="local|slurm|k8s")
    _add_recipe(launch)
    launch.add_argument(
        "--loop", choices=("train", "nemo"), help="the loop to run; by default the loop that the recipe is written for"
    )
    launch.add_argument("--site", type=path, metavar="FILE", help="a YAML file with the settings of the cluster")
    launch.add_argument(
        "--set", action="append", default=[], metavar="key=value", help="override a key of the site file"
    )
    launch.add_argument("--idle", action="store_true", help="start a cluster for interactive use, without a run")
    launch.add_argument("--dry-run", action="store_true", help="print what would be submitted, and submit nothing")
    launch.set_defaults(run=_launch)

    sft = commands.add_parser("sft", help="train a model on the answers of its data, as a warm-up for GRPO")
    _add_recipe(sft)
    sft.add_argument("--output", type=path, required=True, metavar="DIR", help="folder for the HF checkpoint")
    sft.set_defaults(run=_sft)

    stop = commands.add_parser("request-stop", help="for a pod's preStop hook: let the run save before the pod ends")
    stop.add_argument(
        "--linger",
        type=seconds,
        default=0.0,
        metavar="SECONDS",
        help="keep the pod of the driver alive for so long afterwards",
    )
    stop.set_defaults(run=_request_stop)


def _add_models(commands: Commands) -> None:
    """Add the commands that write a checkpoint, and the demo."""
    tiny = commands.add_parser("make-tiny", help="write a tiny checkpoint, tokenizer and dataset")
    tiny.add_argument("folder", type=path, metavar="DIR")
    tiny.add_argument("--task", default="add", help="add (two numbers) or chain (running sums); default add")
    tiny.add_argument("--family", default="qwen3", help="llama, qwen2, qwen3 (the default) or qwen3_moe")
    tiny.add_argument("--seed", type=int, default=0)
    tiny.set_defaults(run=_make_tiny)

    export = commands.add_parser("export", help="write an FP8 checkpoint that plain vLLM serves")
    export.add_argument("--checkpoint", type=path, required=True, metavar="DIR", help="a bfloat16 HF checkpoint")
    export.add_argument("--output", type=path, required=True, metavar="DIR", help="folder for the FP8 checkpoint")
    export.add_argument("--scale-format", default="pow2", help="pow2 (the default) or fp32; give the format of the run")
    export.add_argument("--num-first-layers-in-bf16", type=int, default=0, metavar="N", help="default 0")
    export.add_argument("--num-last-layers-in-bf16", type=int, default=0, metavar="N", help="default 0")
    export.add_argument("--quantization-ignored-layer-kws", nargs="*", default=[], metavar="WORD", help="default none")
    export.set_defaults(run=_export)

    demo = commands.add_parser("demo", help="run make-tiny, sft and train, and print a table of the results")
    demo.add_argument("--runs", type=path, default=Path("runs"), metavar="DIR", help="parent of the demo's folder")
    demo.set_defaults(run=_demo)


def _add_studies(commands: Commands) -> None:
    """Add the commands that examine recipes, runs and formats."""
    doctor = commands.add_parser("doctor", help="check a NeMo RL recipe against its GPUs and its model")
    doctor.add_argument("recipe", type=path, metavar="RECIPE", help="a YAML file, see conf/nemo_rl/")
    doctor.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="key=value, +key=value, ++key=value, ~key")
    doctor.add_argument("--gpu", default="h100", metavar="NAME", help="h100 (the default), h200, b200, ...")
    doctor.add_argument("--json", action="store_true", help="print only JSON on stdout")
    doctor.set_defaults(run=_doctor, unfinished=BAD_INPUT)

    report = commands.add_parser("report", help="write one HTML page about one or several runs")
    report.add_argument("runs", type=path, nargs="+", metavar="RUN", help="a run directory (logger.log_dir)")
    report.add_argument("--output", type=path, metavar="FILE", help="default report.html, for one run in its directory")
    report.set_defaults(run=_report)

    compare = commands.add_parser("compare", help="run several flows with several seeds, and print a table")
    compare.add_argument("comparison", type=path, metavar="COMPARISON", help="a YAML file, see conf/compare/")
    compare.add_argument("overrides", nargs="*", metavar="key=value", help="overrides for every run")
    compare.add_argument(
        "--output", type=path, default=Path("runs/compare"), metavar="DIR", help="default runs/compare"
    )
    compare.add_argument(
        "--table-only", action="store_true", help="run nothing, and print the table of the finished runs"
    )
    compare.set_defaults(run=_compare)

    parity = commands.add_parser(
        "parity", help="compare this package's FP8 format with published and installed libraries"
    )
    parity.add_argument(
        "--size", type=int, default=2048, metavar="N", help="rows and columns of the matrices; default 2048"
    )
    parity.add_argument("--seed", type=int, default=0)
    parity.add_argument("--json", action="store_true", help="print only JSON on stdout")
    parity.set_defaults(run=_parity)


def seconds(text: str) -> float:
    """Parse 0 to MAX_SECONDS seconds. argparse uses this function's name in its message about a ValueError."""
    if not 0 <= (value := float(text)) <= MAX_SECONDS:
        raise ValueError
    return value


def path(text: str) -> Path:
    """Return the path; a leading ~, which the shell does not expand in quotes or after =, is the home folder."""
    return Path(os.path.expanduser(text))


def _add_recipe(command: argparse.ArgumentParser) -> None:
    command.add_argument("--config", type=path, required=True, metavar="RECIPE", help="a YAML file, see conf/")
    command.add_argument("overrides", nargs="*", metavar="key=value", help="overrides, such as grpo.max_num_steps=20")


def _train(arguments: argparse.Namespace) -> bool:
    cfg = _load_config(arguments)
    from nemo_fp8rl.train import train  # loads vLLM and Megatron, so only after the recipe is checked

    return train(cfg, arguments.resume, arguments.restartable)


def _load_config(arguments: argparse.Namespace) -> "Config":
    """Return the config for `train`, from a recipe of this package or of NeMo RL."""
    from nemo_fp8rl.config.recipe import load
    from nemo_fp8rl.nemo_rl.recipe.read_recipe import is_for_nemo_rl

    if is_for_nemo_rl(arguments.config):
        from nemo_fp8rl.nemo_rl.recipe.recipe_for_train import load_for_train

        return load_for_train(arguments.config, arguments.overrides)
    return load(arguments.config, arguments.overrides)


def _nemo(arguments: argparse.Namespace) -> bool:
    from nemo_fp8rl.nemo_rl.run.run_loop import run

    return run(arguments.config, arguments.overrides)


def _launch(arguments: argparse.Namespace) -> bool:
    from nemo_fp8rl.commands.launch.launch_command import launch

    return launch(
        arguments.place,
        arguments.config,
        arguments.overrides,
        loop=arguments.loop,
        site=arguments.site,
        changes=arguments.set,
        idle=arguments.idle,
        dry_run=arguments.dry_run,
    )


def _sft(arguments: argparse.Namespace) -> bool:
    from nemo_fp8rl.config.recipe import load
    from nemo_fp8rl.nemo_rl.recipe.read_recipe import refuse_for_nemo_rl

    refuse_for_nemo_rl(arguments.config, "sft")
    cfg = load(arguments.config, arguments.overrides)
    from nemo_fp8rl.commands.sft import sft

    return sft(cfg, arguments.output)


def _export(arguments: argparse.Namespace) -> bool:
    from nemo_fp8rl.commands.export import export

    return export(
        arguments.checkpoint,
        arguments.output,
        arguments.scale_format,
        arguments.num_first_layers_in_bf16,
        arguments.num_last_layers_in_bf16,
        arguments.quantization_ignored_layer_kws,
    )


def _make_tiny(arguments: argparse.Namespace) -> bool:
    from nemo_fp8rl.commands.tiny_model import make_tiny

    make_tiny(arguments.folder, arguments.task, arguments.seed, arguments.family)
    print(f"wrote {arguments.folder}/model and {arguments.folder}/data.jsonl")
    return True


def _demo(arguments: argparse.Namespace) -> bool:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch reads it at import; more threads slow down so small a model
    from nemo_fp8rl.commands.demo import demo

    return demo(arguments.runs)


def _report(arguments: argparse.Namespace) -> bool:
    from nemo_fp8rl.commands.report.page import report

    path = report(arguments.runs, arguments.output)
    print(f"wrote {path} ({path.stat().st_size / 1e6:.2f} MB)")
    return True


def _compare(arguments: argparse.Namespace) -> bool:
    from nemo_fp8rl.commands.compare.compare_command import compare

    return compare(arguments.comparison, arguments.overrides, arguments.output, arguments.table_only)


def _doctor(arguments: argparse.Namespace) -> bool:
    from nemo_fp8rl.commands.doctor.examine import as_json, examine, show

    report = examine(arguments.recipe, arguments.overrides, arguments.gpu)
    if arguments.json:
        print(as_json(report))
    else:
        show(report)
    return report.is_sound


def _parity(arguments: argparse.Namespace) -> bool:
    from nemo_fp8rl.commands.parity.comparison_table import as_json, report, show

    result = report(arguments.size, arguments.seed)
    if arguments.json:
        print(as_json(result))
    else:
        show(result)
    return True


def _request_stop(arguments: argparse.Namespace) -> bool:
    from nemo_fp8rl.run.pod_stop import request_stop

    request_stop(arguments.linger)
    return True


if __name__ == "__main__":
    sys.exit(main())
