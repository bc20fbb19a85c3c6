"""The words of the command line: every command with its options and examples, and what a misspelled word means.

The handlers are in `cli`; a parsed command names its handler by `command`.
"""

import argparse
import difflib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from nemo_fp8rl import __version__
from nemo_fp8rl.common.errors import BAD_INPUT, INTERRUPTED, UserError
from nemo_fp8rl.common.missing_packages import REQUIREMENTS

MAX_SECONDS = 86_400.0  # a day
OVERRIDE = re.compile(r"\+{0,2}[\w.@]+=|~[\w.@]+")
"""The beginning of an override, which tells it from a recipe's path or name."""

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the words; unlike with plain argparse, key=value may also stand between and after options.

    Raises: UserError for an unknown command
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser, commands = _make_parser()
    command = next((word for word in words if not word.startswith("-")), None)
    if command is not None and command not in commands.choices:
        near = difflib.get_close_matches(command, commands.choices, n=1)
        hint = f"did you mean {near[0]}?" if near else ""
        raise UserError(f"there is no command {command}; {hint or '`nemo-fp8rl --help` lists them'}")
    arguments, unparsed = parser.parse_known_args(words)
    subparser = commands.choices[arguments.command]
    if unknown := [word for word in unparsed if word.startswith("-") or not hasattr(arguments, "overrides")]:
        options = [option for option in subparser._option_string_actions if option.startswith("--")]
        near = difflib.get_close_matches(unknown[0].partition("=")[0], options, n=1)
        subparser.error(f"unrecognized arguments: {' '.join(unknown)}" + (f"; did you mean {near[0]}?" if near else ""))
    if hasattr(arguments, "overrides"):
        arguments.overrides += unparsed
    if hasattr(arguments, "config") and arguments.config is None:
        recipe = next((word for word in arguments.overrides if _is_recipe(word)), None)
        if recipe is None:
            subparser.error("a recipe is required: the path of a YAML file, or a name that `nemo-fp8rl recipes` lists")
        arguments.overrides.remove(recipe)
        arguments.config = path(recipe)
    return arguments


def _is_recipe(word: str) -> bool:
    return not OVERRIDE.match(word) or path(word).is_file()


class _PrintRequirements(argparse.Action):
    """Print the path and end, as argparse's action "version" does, which would break a long line."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(REQUIREMENTS)
        parser.exit()


def _make_parser() -> tuple[argparse.ArgumentParser, Commands]:
    parser = argparse.ArgumentParser(prog="nemo-fp8rl", description="GRPO with FP8 end to end.")
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument(
        "--requirements",
        action=_PrintRequirements,
        nargs=0,
        help="print the file with the tested versions of all that a CPU needs, for pip install --no-deps -r",
    )
    parser.set_defaults(unfinished=INTERRUPTED)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for add in (_add_runs, _add_launch, _add_models, _add_studies):
        add(commands)
    return parser, commands


def _add(commands: Commands, name: str, purpose: str, *examples: str) -> argparse.ArgumentParser:
    """Add a command.

    examples: its words after the name, each with a comment
    """
    lines = [f"  nemo-fp8rl {name} {words}".replace("  #", " #") for words in examples]
    width = max(line.index("#") for line in lines)
    texts = [f"{code.rstrip():{width}} #{comment}" for line in lines for code, _, comment in [line.partition("#")]]
    return commands.add_parser(
        name,
        help=purpose,
        description=f"{purpose[0].upper()}{purpose[1:]}.",
        epilog="\n".join(["examples:", *texts]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_recipe(
    command: argparse.ArgumentParser, overrides: str = "overrides, such as grpo.max_num_steps=20", what: str = "RECIPE"
) -> None:
    recipe = "a YAML file, or a name that `nemo-fp8rl recipes` lists"
    command.add_argument("overrides", nargs="*", metavar=what, help=f"{recipe}; then {overrides}")
    command.add_argument("--config", type=path, metavar=what, help="the same, for scripts")


def _add_resume(command: argparse.ArgumentParser) -> None:
    command.add_argument("--resume", action="store_true", help="continue the run in logger.log_dir")
    more = "like --resume, but start a new run if there is none"
    command.add_argument("--restartable", action="store_true", help=more)


def _add_runs(commands: Commands) -> None:
    """Add the commands that run a recipe."""
    train = _add(
        commands,
        "train",
        "run GRPO from a recipe",
        "tiny_cpu # a shipped recipe; `make-tiny` and `sft` come first",
        "my.yaml logger.log_dir=runs/b grpo.seed=2 # a recipe of your own, with two other values",
        "runs/b/config.yaml --resume # go on where that run stopped",
    )
    _add_recipe(train)
    _add_resume(train)

    nemo = _add(
        commands,
        "nemo",
        "run NeMo RL's GRPO loop, with the trainer and engines of this package or of NeMo RL",
        "qwen3-8b-fp8-e2e-kv # on the head of a Ray cluster; NEMO_RL_SRC names NeMo RL's checkout",
        "my.yaml grpo.seed=2 +policy.new_key=1 ~policy.old_key # change, add and remove a key",
    )
    _add_recipe(nemo, "overrides in Hydra's grammar; +key=value adds a key")

    sft = _add(
        commands,
        "sft",
        "train a model on the answers of its data, or on raw text",
        "tiny_sft --output runs/tiny/warm # the model from which `train tiny_cpu` begins",
        "my.yaml --resume sft.max_num_epochs=6 # go on where the run in logger.log_dir stopped",
    )
    _add_recipe(sft)
    _add_resume(sft)
    sft.add_argument("--output", type=path, metavar="DIR", help="new folder for the final HF checkpoint")


def _add_launch(commands: Commands) -> None:
    """Add the commands of launchers."""
    launch = _add(
        commands,
        "launch",
        "run a recipe on this machine, on SLURM or on Kubernetes",
        "local tiny_cpu --dry-run # how the GPUs of this machine would be divided",
        "slurm my.yaml --site site.yaml --set nodes=2 # submit two nodes",
        "k8s my.yaml --site site.yaml --dry-run # print the manifest",
    )
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

    engines = _add(
        commands,
        "engines",
        "change the number of vLLM engines of a run that is at work",
        "runs/a 6 # from cluster.min_generation_engines to max_generation_engines",
    )
    engines.add_argument("run", type=path, metavar="RUN", help="the run directory (logger.log_dir)")
    engines.add_argument("count", type=count, metavar="COUNT", help="how many engines it is to have")

    stop = _add(
        commands,
        "request-stop",
        "for a pod's preStop hook: let the run save before the pod ends",
        "--linger 60 # the driver's pod stays for a minute afterwards",
    )
    stop.add_argument(
        "--linger",
        type=seconds,
        default=0.0,
        metavar="SECONDS",
        help="keep the pod of the driver alive for so long afterwards",
    )


def _add_models(commands: Commands) -> None:
    """Add the commands that write a checkpoint, and the demo."""
    demo = _add(
        commands,
        "demo",
        "run make-tiny, sft and train, and print a table of the results",
        "# into runs/demo-1, from any folder",
        "--steps 5 --warm-up-steps 20 --runs /tmp/runs # a quick one, which learns nothing",
        "--loop nemo # NeMo RL's own loop; NEMO_RL_SRC names its checkout, PYTHONPATH what it imports",
    )
    demo.add_argument("--runs", type=path, default=Path("runs"), metavar="DIR", help="parent of the demo's folder")
    demo.add_argument(
        "--loop", choices=("train", "nemo"), default="train", help="this package's loop (the default) or NeMo RL's"
    )
    demo.add_argument("--steps", type=count, metavar="N", help="GRPO steps; default 100, with NeMo RL's loop 20")
    demo.add_argument("--warm-up-steps", type=count, metavar="N", help="supervised steps before; default 130")

    tiny = _add(
        commands,
        "make-tiny",
        "write a tiny checkpoint, tokenizer and dataset",
        "runs/tiny # for the recipes tiny_sft and tiny_cpu",
        "runs/moe --family qwen3_moe --task chain # a mixture of experts, and running sums",
    )
    tiny.add_argument("folder", type=path, metavar="DIR")
    tiny.add_argument("--task", default="add", help="add (two numbers) or chain (running sums); default add")
    tiny.add_argument("--family", default="qwen3", help="llama, qwen2, qwen3 (the default) or qwen3_moe")
    tiny.add_argument("--seed", type=int, default=0)

    export = _add(
        commands,
        "export",
        "write an FP8, MXFP8 or NVFP4 checkpoint that plain vLLM serves",
        "--checkpoint runs/a/checkpoints/step_100/policy/weights --output a-fp8 # then: vllm serve a-fp8",
    )
    export.description = "An option left out follows the run whose checkpoint it is; outside a run it is the default."
    export.add_argument(
        "--checkpoint", type=path, required=True, metavar="DIR", help="a bfloat16 HF checkpoint, or adapters"
    )
    export.add_argument("--output", type=path, required=True, metavar="DIR", help="folder for the new checkpoint")
    export.add_argument("--merge", action="store_true", help="add adapters to the weights; else they stay beside them")
    export.add_argument("--format", help="fp8 (the default), mxfp8, nvfp4, nvfp4_a16, or bf16 with --merge")
    export.add_argument("--scale-format", help="pow2 (the default) or fp32")
    export.add_argument("--weight-block", help="of mxfp8 and nvfp4: square (the default) or line")
    export.add_argument("--num-first-layers-in-bf16", type=int, metavar="N", help="default 0")
    export.add_argument("--num-last-layers-in-bf16", type=int, metavar="N", help="default 0")
    export.add_argument("--quantization-ignored-layer-kws", nargs="*", metavar="WORD", help="default none")


def _add_studies(commands: Commands) -> None:
    """Add the commands that examine recipes, runs and formats."""
    _add(
        commands,
        "recipes",
        "list the recipes that the package ships, by the names that stand for them",
        "# prints names, commands and purposes",
    )

    doctor = _add(
        commands,
        "doctor",
        "check a NeMo RL recipe against its GPUs and its model",
        "qwen3-8b-fp8-e2e-kv # on H100s, which need not be here; NEMO_RL_SRC names NeMo RL's checkout",
        "my.yaml --gpu b200 cluster.num_nodes=1 # other GPUs, fewer nodes",
        "my.yaml --model-config path/to/config.json # a model whose sizes doctor does not know",
    )
    _add_recipe(doctor, "overrides: key=value, +key=value, ++key=value, ~key")
    doctor.add_argument("--gpu", default="h100", metavar="NAME", help="h100 (the default), h200, b200, ...")
    doctor.add_argument("--model-config", type=path, metavar="FILE", help="the model's config.json, or its folder")
    fingerprint_help = "on a GPU node: do trainer and engine compute the same bits (nemo_fp8rl.align=vllm)?"
    doctor.add_argument("--fingerprint", action="store_true", help=fingerprint_help)
    doctor.add_argument("--json", action="store_true", help="print only JSON on stdout")
    doctor.set_defaults(unfinished=BAD_INPUT)

    report = _add(
        commands,
        "report",
        "write one HTML page about one or several runs",
        "runs/a # into runs/a/report.html",
        "runs/a runs/b --output both.html # two runs overlaid",
    )
    report.add_argument("runs", type=path, nargs="+", metavar="RUN", help="a run directory (logger.log_dir)")
    report.add_argument("--output", type=path, metavar="FILE", help="default report.html, for one run in its directory")

    compare = _add(
        commands,
        "compare",
        "run several flows with several seeds, and print a table",
        "tiny --dry-run # the runs, and about how long they take",
        "tiny --flows bf16,fp8_e2e --seeds 1 --part flows # two runs of them",
    )
    _add_recipe(compare, "overrides for every run", "COMPARISON")
    compare.add_argument(
        "--output", type=path, default=Path("runs/compare"), metavar="DIR", help="default runs/compare"
    )
    compare.add_argument("--flows", type=names, metavar="NAME,...", help="run these flows only")
    compare.add_argument("--seeds", type=numbers, metavar="N,...", help="run these seeds only")
    compare.add_argument("--part", choices=("flows", "lengths"), help="run this part only")
    compare.add_argument("--dry-run", action="store_true", help="run nothing, and list the runs with their time")
    compare.add_argument(
        "--table-only", action="store_true", help="run nothing, and print the table of the finished runs"
    )

    parity = _add(
        commands,
        "parity",
        "compare this package's FP8 format with published and installed libraries",
        "--size 256 # quicker, with smaller matrices",
    )
    parity.add_argument(
        "--size", type=int, default=2048, metavar="N", help="rows and columns of the matrices; default 2048"
    )
    parity.add_argument("--seed", type=int, default=0)
    parity.add_argument("--json", action="store_true", help="print only JSON on stdout")


# argparse uses the name of these functions in its message about a ValueError.
def seconds(text: str) -> float:
    """Parse 0 to MAX_SECONDS seconds."""
    if not 0 <= (value := float(text)) <= MAX_SECONDS:
        raise ValueError
    return value


def count(text: str) -> int:
    """Parse a number above 0."""
    if (value := int(text)) < 1:
        raise ValueError
    return value


def names(text: str) -> tuple[str, ...]:
    """Parse names between commas."""
    return tuple(filter(None, text.split(",")))


def numbers(text: str) -> tuple[int, ...]:
    """Parse whole numbers between commas."""
    return tuple(int(word) for word in names(text))


def path(text: str) -> Path:
    """Return the path; a leading ~, which the shell does not expand in quotes or after =, is the home folder."""
    return Path(os.path.expanduser(text))
