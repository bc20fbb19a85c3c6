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
from typing import TYPE_CHECKING

from nemo_fp8rl import __version__
from nemo_fp8rl.common.errors import BAD_INPUT, INTERRUPTED, UserError

if TYPE_CHECKING:
    from nemo_fp8rl.config.schema import Config

OF_THE_DISK = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENAMETOOLONG),
    *(errno.ENOTDIR, errno.EISDIR, errno.ELOOP),
}
"""What a user mends whatever we were doing: rights, room, names."""
A_DAY = 86_400.0


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    _quiet_libraries()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name that the terminal's encoding has no letters for
    try:
        finished = arguments.run(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
    except UserError as error:
        print(f"nemo-fp8rl: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return BAD_INPUT
    except OSError as error:
        if isinstance(error, BrokenPipeError) and sys.stdout is not None and _reader_left():
            return 0
        if error.errno not in OF_THE_DISK:
            raise
        print(f"nemo-fp8rl: {error.filename or 'the output'}: {error.strerror}; give another path", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("nemo-fp8rl: interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0 if finished else arguments.unfinished


def _reader_left() -> bool:
    """Whether nobody reads any more what is printed, as with `| head`; the rest is dropped then."""
    from nemo_fp8rl.common.display import discard_output

    asked = select.poll()
    asked.register(sys.stdout, select.POLLOUT)
    left = any(event & select.POLLERR for _, event in asked.poll(0))
    if left:
        discard_output(sys.stdout)
    return left


def _quiet_libraries() -> None:
    """Keep warnings of torch, Megatron and vLLM about themselves off the screen; ours stay."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    warnings.filterwarnings("ignore", module=r"(torch|megatron|vllm|transformers)(\.|$)")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # of a CUDA build where no GPU is


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """argparse takes the key=value of a command in one place only; here they may stand between options, too."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if unknown := [word for word in rest if word.startswith("-") or not hasattr(arguments, "overrides")]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest:
        arguments.overrides += rest
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="nemo-fp8rl", description="GRPO with FP8 end to end.")
    parser.add_argument("--version", action="version", version=__version__)
    parser.set_defaults(unfinished=INTERRUPTED)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="run GRPO from a recipe")
    _add_recipe(train)
    train.add_argument("--resume", action="store_true", help="continue the run in logger.log_dir")
    train.add_argument("--restartable", action="store_true", help="like --resume; begins where none was saved")
    train.set_defaults(run=_train)

    nemo = commands.add_parser("nemo", help="run NeMo RL's own GRPO loop, with our trainer and engines or with its own")
    nemo.add_argument("--config", type=path, required=True, metavar="RECIPE", help="NeMo RL's, see conf/nemo_rl/")
    nemo.add_argument("overrides", nargs="*", metavar="key=value", help="in Hydra's grammar: +key=value adds a key")
    nemo.set_defaults(run=_nemo)

    launch = commands.add_parser("launch", help="run a recipe on this machine, on SLURM or on Kubernetes")
    launch.add_argument("place", choices=("local", "slurm", "k8s"), metavar="local|slurm|k8s")
    _add_recipe(launch)
    launch.add_argument("--loop", choices=("train", "nemo"), help="ours or NeMo RL's; by default the recipe's own")
    launch.add_argument("--site", type=path, metavar="FILE", help="what the cluster asks for, a YAML file")
    launch.add_argument("--set", action="append", default=[], metavar="key=value", help="a key of the site file")
    launch.add_argument("--idle", action="store_true", help="a cluster that waits for people instead of a run")
    launch.add_argument("--dry-run", action="store_true", help="print exactly what would be submitted")
    launch.set_defaults(run=_launch)

    sft = commands.add_parser("sft", help="warm a model up on the answers of its data")
    _add_recipe(sft)
    sft.add_argument("--output", type=path, required=True, metavar="DIR", help="where the HF checkpoint goes")
    sft.set_defaults(run=_sft)

    export = commands.add_parser("export", help="write an FP8 checkpoint that plain vLLM serves")
    export.add_argument("--checkpoint", type=path, required=True, metavar="DIR", help="a bfloat16 HF checkpoint")
    export.add_argument("--output", type=path, required=True, metavar="DIR", help="where the FP8 checkpoint goes")
    export.add_argument("--scale-format", default="pow2", help="pow2 (the default) or fp32, as the run had it")
    export.add_argument("--num-first-layers-in-bf16", type=int, default=0, metavar="N", help="default 0")
    export.add_argument("--num-last-layers-in-bf16", type=int, default=0, metavar="N", help="default 0")
    export.add_argument("--quantization-ignored-layer-kws", nargs="*", default=[], metavar="WORD", help="default none")
    export.set_defaults(run=_export)

    tiny = commands.add_parser("make-tiny", help="write a tiny checkpoint, tokenizer and dataset")
    tiny.add_argument("folder", type=path, metavar="DIR")
    tiny.add_argument("--task", default="add", help="add (two numbers) or chain (running sums); default add")
    tiny.add_argument("--family", default="qwen3", help="llama, qwen2, qwen3 (the default) or qwen3_moe")
    tiny.add_argument("--seed", type=int, default=0)
    tiny.set_defaults(run=_make_tiny)

    demo = commands.add_parser("demo", help="make-tiny, sft and train in one go, and a table of what came out")
    demo.add_argument("--runs", type=path, default=Path("runs"), metavar="DIR", help="parent of the demo's folder")
    demo.set_defaults(run=_demo)

    report = commands.add_parser("report", help="one HTML page about a run, or about several side by side")
    report.add_argument("runs", type=path, nargs="+", metavar="RUN", help="a run directory (logger.log_dir)")
    report.add_argument("--output", type=path, metavar="FILE", help="default report.html, of one run in its directory")
    report.set_defaults(run=_report)

    compare = commands.add_parser("compare", help="run flows side by side over several seeds, and their table")
    compare.add_argument("comparison", type=path, metavar="COMPARISON", help="a YAML file, see conf/compare/")
    compare.add_argument("overrides", nargs="*", metavar="key=value", help="of every run")
    compare.add_argument(
        "--output", type=path, default=Path("runs/compare"), metavar="DIR", help="default runs/compare"
    )
    compare.add_argument("--table-only", action="store_true", help="run nothing, show what has finished")
    compare.set_defaults(run=_compare)

    doctor = commands.add_parser("doctor", help="check a recipe for NeMo RL against its GPUs and its model")
    doctor.add_argument("recipe", type=path, metavar="RECIPE", help="a YAML file, see conf/nemo_rl/")
    doctor.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="key=value, +key=value, ++key=value, ~key")
    doctor.add_argument("--gpu", default="h100", metavar="NAME", help="h100 (the default), h200, b200, ...")
    doctor.add_argument("--json", action="store_true", help="print JSON, and nothing else, on stdout")
    doctor.set_defaults(run=_doctor, unfinished=BAD_INPUT)

    parity = commands.add_parser("parity", help="compare the FP8 contract with what others publish and install")
    parity.add_argument("--size", type=int, default=2048, metavar="N", help="side of the matrices; default 2048")
    parity.add_argument("--seed", type=int, default=0)
    parity.add_argument("--json", action="store_true", help="print JSON, and nothing else, on stdout")
    parity.set_defaults(run=_parity)

    stop = commands.add_parser("request-stop", help="a pod's preStop hook: have the run save before the pod ends")
    stop.add_argument(
        "--linger", type=seconds, default=0.0, metavar="SECONDS", help="then the driver's own pod stays for so long"
    )
    stop.set_defaults(run=_request_stop)
    return parser


def seconds(text: str) -> float:
    """Seconds, a day at most; argparse makes a sentence of the ValueError and of this function's name."""
    if not 0 <= (value := float(text)) <= A_DAY:
        raise ValueError
    return value


def path(text: str) -> Path:
    """A leading ~ that the shell left, as in quotes and after =, is the home folder."""
    return Path(os.path.expanduser(text))


def _add_recipe(command: argparse.ArgumentParser) -> None:
    command.add_argument("--config", type=path, required=True, metavar="RECIPE", help="a YAML file, see conf/")
    command.add_argument("overrides", nargs="*", metavar="key=value", help="such as grpo.max_num_steps=20")


def _train(arguments: argparse.Namespace) -> bool:
    cfg = _config(arguments)
    from nemo_fp8rl.train import train  # loads vllm and megatron: after the recipe is known to be good

    return train(cfg, arguments.resume, arguments.restartable)


def _config(arguments: argparse.Namespace) -> "Config":
    """The config of our own loop, from a recipe of its own or of NeMo RL's."""
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
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch loads; so small a model loses by more threads
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
