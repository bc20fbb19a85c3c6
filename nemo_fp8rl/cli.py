"""`nemo-fp8rl`: the command line. Bad input ends in one sentence and exit code 2, Ctrl-C in 130."""

import argparse
import atexit
import errno
import io
import logging
import os
import select
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from nemo_fp8rl.commands.arguments import parse
from nemo_fp8rl.common.errors import BAD_INPUT, INTERRUPTED, UserError
from nemo_fp8rl.common.missing_packages import as_user_error, check_torch_libraries
from nemo_fp8rl.common.vllm_version import ENGINE_THREAD

if TYPE_CHECKING:
    from nemo_fp8rl.config.schema import Config

DISK_ERRORS = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENAMETOOLONG),
    *(errno.ENOTDIR, errno.EISDIR, errno.ELOOP),
}
"""Error numbers that the user can mend: permissions, disk space, file names."""
WITH_TORCH_LIBRARIES = ("train", "nemo", "sft", "make-tiny", "demo")
"""Commands that import transformers or vLLM, which import torchvision where it is installed."""


def main(argv: Sequence[str] | None = None) -> int:
    _quiet_libraries()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for names that the terminal's encoding cannot show
    command = "nemo-fp8rl"
    try:
        arguments = parse(argv)
        command = f"nemo-fp8rl {arguments.command}"
        if arguments.command in WITH_TORCH_LIBRARIES:
            check_torch_libraries()
        finished = HANDLERS[arguments.command](arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
    except UserError as error:
        code = _refuse(error)
        if argv is None and any(thread.name == ENGINE_THREAD for thread in threading.enumerate()):
            _exit_at_once(code)  # it may still start an engine, and a thread in C++ code aborts Python's own end
        return code
    except ModuleNotFoundError as error:
        if (refusal := as_user_error(error, command)) is None:
            raise
        return _refuse(refusal)
    except OSError as error:
        if isinstance(error, BrokenPipeError) and sys.stdout is not None and _is_stdout_abandoned():
            return 0
        if error.errno not in DISK_ERRORS:
            raise
        print(f"nemo-fp8rl: {error.filename or 'the output'}: {error.strerror}; give another path", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("nemo-fp8rl: interrupted", file=sys.stderr)
        if argv is None:
            _exit_at_once(INTERRUPTED)
        return INTERRUPTED
    return 0 if finished else arguments.unfinished


def _refuse(error: UserError) -> int:
    print(f"nemo-fp8rl: {' '.join(str(error).splitlines())}", file=sys.stderr)
    return BAD_INPUT


def _exit_at_once(code: int) -> NoReturn:
    """End the process after what was registered for its end, but not as Python does.

    Where an interrupt left Ray in the middle of a call, Ray's own end and that of its threads crash now and then, and
    the process would end by a segmentation fault. Ray's processes end with this one.
    """
    if worker := sys.modules.get("ray._private.worker"):
        atexit.unregister(worker.shutdown)
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


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


def _train(arguments: argparse.Namespace) -> bool:
    cfg = _load_config(arguments)
    from nemo_fp8rl.workers import prepare_process

    prepare_process(cfg)
    from nemo_fp8rl.run.summary import show_end
    from nemo_fp8rl.train import train  # loads vLLM and Megatron, so only after the recipe is checked

    if not train(cfg, arguments.resume, arguments.restartable):
        return False
    show_end(cfg)
    return True


def _load_config(arguments: argparse.Namespace) -> "Config":
    """Return the config for `train`, from a recipe of this package or of NeMo RL."""
    from nemo_fp8rl.config.recipe import load
    from nemo_fp8rl.config.recipe_names import find_recipe
    from nemo_fp8rl.nemo_rl.recipe.read_recipe import is_for_nemo_rl

    recipe = find_recipe(arguments.config)
    if is_for_nemo_rl(recipe):
        from nemo_fp8rl.nemo_rl.recipe.recipe_for_train import load_for_train

        return load_for_train(recipe, arguments.overrides)
    return load(recipe, arguments.overrides)


def _nemo(arguments: argparse.Namespace) -> bool:
    from nemo_fp8rl.config.recipe_names import find_recipe
    from nemo_fp8rl.nemo_rl.recipe.read_recipe import FOLDER

    recipe = find_recipe(arguments.config, FOLDER)
    from nemo_fp8rl.nemo_rl.run.run_loop import run

    return run(recipe, arguments.overrides)


def _launch(arguments: argparse.Namespace) -> bool:
    from nemo_fp8rl.commands.launch.launch_command import launch
    from nemo_fp8rl.config.recipe_names import find_recipe
    from nemo_fp8rl.nemo_rl.recipe.read_recipe import FOLDER

    return launch(
        arguments.place,
        find_recipe(arguments.config, FOLDER if arguments.loop == "nemo" else ""),
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
    cfg = load(arguments.config, arguments.overrides, has_rollouts=False)
    from nemo_fp8rl.workers import prepare_process

    prepare_process(cfg)
    from nemo_fp8rl.commands.sft import sft
    from nemo_fp8rl.run.summary import show_end

    output = arguments.output
    if not sft(cfg, output, arguments.resume, arguments.restartable):
        return False
    show_end(cfg, "sft")
    if output:
        recipe = "tiny_cpu" if str(output) == "runs/tiny/warm" else f"RECIPE policy.model_name={output}"
        print(f"wrote {output}\nnext: nemo-fp8rl train {recipe}")
    return True


def _export(arguments: argparse.Namespace) -> bool:
    from nemo_fp8rl.commands.export.convert import export

    return export(
        arguments.checkpoint,
        arguments.output,
        arguments.scale_format,
        arguments.num_first_layers_in_bf16,
        arguments.num_last_layers_in_bf16,
        arguments.quantization_ignored_layer_kws,
        arguments.format,
        arguments.weight_block,
        arguments.merge,
    )


def _make_tiny(arguments: argparse.Namespace) -> bool:
    from nemo_fp8rl.commands.tiny_model import make_tiny

    make_tiny(arguments.folder, arguments.task, arguments.seed, arguments.family)
    print(f"wrote {arguments.folder}/model and {arguments.folder}/data.jsonl")
    if str(arguments.folder) == "runs/tiny":  # where the shipped recipes look
        print("next: nemo-fp8rl sft tiny_sft --output runs/tiny/warm")
    return True


def _demo(arguments: argparse.Namespace) -> bool:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch reads it at import; more threads slow down so small a model
    import torch

    from nemo_fp8rl.workers.library_environment import set_for_engine

    set_for_engine(torch.cuda.is_available())
    if arguments.loop == "nemo":
        from nemo_fp8rl.commands.demo_nemo_rl import demo_nemo_rl

        return demo_nemo_rl(arguments.runs, arguments.steps, arguments.warm_up_steps)
    from nemo_fp8rl.commands.demo import demo

    return demo(arguments.runs, arguments.steps, arguments.warm_up_steps)


def _recipes(arguments: argparse.Namespace) -> bool:
    from nemo_fp8rl.commands.recipe_list import show

    show()
    return True


def _report(arguments: argparse.Namespace) -> bool:
    from nemo_fp8rl.commands.report.page import report

    path = report(arguments.runs, arguments.output)
    print(f"wrote {path} ({path.stat().st_size / 1e6:.2f} MB)")
    return True


def _compare(arguments: argparse.Namespace) -> bool:
    from nemo_fp8rl.commands.compare.compare_command import Choice, compare

    return compare(
        arguments.config,
        arguments.overrides,
        arguments.output,
        Choice(arguments.flows, arguments.seeds, arguments.part),
        "table" if arguments.table_only else "plan" if arguments.dry_run else "run",
    )


def _doctor(arguments: argparse.Namespace) -> bool:
    from nemo_fp8rl.commands.doctor.examine import as_json, examine, show

    report = examine(
        arguments.config, arguments.overrides, arguments.gpu, arguments.model_config, arguments.fingerprint
    )
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


def _engines(arguments: argparse.Namespace) -> bool:
    from nemo_fp8rl.commands.engines import request_engines

    request_engines(arguments.run, arguments.count)
    return True


def _request_stop(arguments: argparse.Namespace) -> bool:
    from nemo_fp8rl.run.pod_stop import request_stop

    request_stop(arguments.linger)
    return True


HANDLERS: dict[str, Callable[[argparse.Namespace], bool]] = {
    "train": _train,
    "nemo": _nemo,
    "launch": _launch,
    "sft": _sft,
    "engines": _engines,
    "request-stop": _request_stop,
    "make-tiny": _make_tiny,
    "export": _export,
    "demo": _demo,
    "recipes": _recipes,
    "doctor": _doctor,
    "report": _report,
    "compare": _compare,
    "parity": _parity,
}
"""A handler returns False for what `arguments.unfinished` says."""


if __name__ == "__main__":
    sys.exit(main())
