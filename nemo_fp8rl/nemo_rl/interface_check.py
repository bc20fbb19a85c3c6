"""Compare what this package calls and implements of NeMo RL with what a checkout has, before any worker starts.

It reads signatures in the checkout's files, so a version that is newer than this package is judged by what it has.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import nemo_fp8rl
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.nemo_rl.recipe.checkout import Checkout
from nemo_fp8rl.nemo_rl.recipe.source_signatures import (
    Parameters,
    annotated,
    find,
    imports,
    is_abstract,
    methods,
    parse,
)

PACKAGE = Path(nemo_fp8rl.__file__).parent
CALLERS = ("algorithms", "experience", "weight_sync")
"""Folders of NeMo RL whose code calls policies, engines and synchronizers."""


@dataclass(frozen=True)
class Call:
    """A function of NeMo RL that this package calls.

    file, name:  where it is; a method is `Class.method`
    positional:  arguments that are given by position
    keywords:    names of those that are given by keyword
    forwards:    NeMo RL itself gives the other arguments
    """

    file: str
    name: str
    positional: int = 0
    keywords: tuple[str, ...] = ()
    forwards: bool = False


@dataclass(frozen=True)
class Implementation:
    """A class of this package that stands for one of NeMo RL.

    file, name:  NeMo RL's class
    our_file:    the module of ours, relative to the package
    our_name:    the class of ours
    mixin:       ours precedes NeMo RL's class, and so needs only what it overrides
    """

    file: str
    name: str
    our_file: str
    our_name: str
    mixin: bool = False


GRPO = "algorithms/grpo.py"
CALLS = (
    Call(GRPO, "grpo_train", 12),
    Call(GRPO, "async_grpo_train", 13),
    Call("algorithms/utils.py", "get_tokenizer", 1),
    Call("algorithms/utils.py", "set_seed", 1),
    Call("data/utils.py", "setup_response_data", 3),
    Call("models/generation/__init__.py", "configure_generation_config", 2, ("has_refit_draft_weights", "trains_mtp")),
    Call("utils/logger.py", "get_next_experiment_dir", 1),
    Call("utils/config.py", "load_config", 1),
    Call("utils/config.py", "parse_hydra_overrides", 2),
    Call("utils/config.py", "register_omegaconf_resolvers"),
    Call("environments/utils.py", "register_env", 2),
)
"""What every run calls."""
CALLS_OF_OURS = (
    Call("utils/logger.py", "Logger.__init__", 1),
    Call("utils/checkpoint.py", "CheckpointManager.__init__", 1),
    Call("utils/checkpoint.py", "CheckpointManager.get_latest_checkpoint_path"),
    Call("utils/checkpoint.py", "CheckpointManager.load_training_info", 1),
    Call("utils/checkpoint.py", "CheckpointManager.get_resume_paths", 1),
    Call("data/llm_message_utils.py", "batched_message_log_to_flat_message", 1, ("pad_value_dict",)),
)
CALLS_OF_NEMO_RLS = (
    Call(GRPO, "setup", 4, ("policy_factory",)),
    Call("distributed/virtual_cluster.py", "init_ray"),
    Call("models/policy/lm_policy.py", "Policy.__init__", 0, ("config", "worker_extension_cls_fqn"), forwards=True),
    Call("utils/venvs.py", "create_local_venv_on_each_node", 2),
    Call("models/policy/utils.py", "get_runtime_env_for_policy_worker", 1),
)
CONTROLLER = "algorithms/single_controller.py"
CONTROLLER_SETUP = "algorithms/single_controller_utils/setup.py"
CALLS_OF_SINGLE_CONTROLLER = (
    Call(CONTROLLER_SETUP, "setup_single_controller", 2),
    Call("algorithms/single_controller_utils/config.py", "validate_single_controller_config", 1),
    *(Call(CONTROLLER, f"SingleControllerActor.{name}") for name in ("run", "ping")),
    Call(CONTROLLER, "SingleControllerActor.__init__", 0, ("master_config", "actor_args", "setup_timing_metrics")),
    Call(CONTROLLER_SETUP, "TQPolicy"),  # replaced there
    Call("models/policy/tq_policy.py", "TQPolicy.begin_train_step", 1),
)
ACTOR_ARGUMENTS = ("env_handles", "gen_handle", "loss_fn", "trainer_handle", "weight_synchronizer")
"""Fields of SingleControllerActorArgs that are read or replaced."""
WORKER = "models/policy/workers/megatron_policy_worker.py", "MegatronPolicyWorkerImpl"
CALLS_WITH_FP8 = (
    Call(WORKER[0], f"{WORKER[1]}._is_fp8_export"),
    Call(WORKER[0], f"{WORKER[1]}._build_refit_conversion_tasks"),
    Call("models/generation/vllm/vllm_backend.py", "VllmInternalWorkerExtension._load_weights", 1),
)
"""What FP8 between NeMo RL's own workers calls or replaces."""
OUR_WORKERS = (
    Implementation(
        "models/policy/interfaces.py", "PolicyInterface", "nemo_rl/adapters/megatron_policy.py", "MegatronFp8Policy"
    ),
    Implementation(
        *("models/policy/interfaces.py", "ColocatablePolicyInterface"),
        *("nemo_rl/adapters/megatron_policy.py", "MegatronFp8Policy"),
    ),
    Implementation(
        *("models/generation/interfaces.py", "GenerationInterface"),
        *("nemo_rl/adapters/vllm_generation.py", "VllmFp8Generation"),
    ),
    Implementation(
        "weight_sync/interfaces.py", "WeightSynchronizer", "nemo_rl/adapters/weight_sync.py", "Fp8WeightSynchronizer"
    ),
)
STREAM = Implementation(
    *WORKER,
    *("nemo_rl/stock/fp8_stream.py", "Fp8Stream"),
    mixin=True,
)
ENGINE = Implementation(
    *("utils/checkpoint_engines/base.py", "CheckpointEngine"),
    *("nemo_rl/refit_transport/checkpoint_engine.py", "Fp8CheckpointEngine"),
)
"""Optional: v0.7.x has no such interface."""


def check_interface(checkout: Checkout, uses_package: bool, single_controller: bool = False) -> None:
    """Raise UserError, with every difference, if a run could fail for a signature that this package does not know.

    uses_package:       trainer and engines are this package's
    single_controller:  NeMo RL's single controller runs, rather than one of its loops
    """
    problems = list(describe_differences(checkout, uses_package, single_controller))
    if problems:
        raise UserError(
            f"{checkout.root} is NeMo RL {checkout.version} with an interface that this package does not know: "
            f"{'; '.join(problems)}: use its main of August 2026 or v0.7.x, or a later nemo_fp8rl"
        )


def describe_differences(checkout: Checkout, uses_package: bool, single_controller: bool = False) -> Iterator[str]:
    """Yield one phrase for each difference that a run could fail for."""
    if single_controller:
        yield from (phrase for call in CALLS_OF_SINGLE_CONTROLLER for phrase in _check_call(checkout, call))
        fields = annotated(find(checkout.package / CONTROLLER_SETUP, "SingleControllerActorArgs"))
        for name in ACTOR_ARGUMENTS:
            if name not in fields:
                yield f"SingleControllerActorArgs of nemo_rl/{CONTROLLER_SETUP} has no {name}"
    calls, implementations = [*CALLS, *(CALLS_OF_OURS if uses_package else CALLS_OF_NEMO_RLS)], list(OUR_WORKERS)
    if not uses_package:
        with_fp8 = checkout.engines_survive_fp8_refit
        calls += CALLS_WITH_FP8 if with_fp8 else ()
        implementations = [STREAM] * with_fp8 + [ENGINE] * checkout.has_checkpoint_engines
    for call in calls:
        yield from _check_call(checkout, call)
    for implementation in implementations:
        yield from _check_implementation(checkout, implementation)


def _check_call(checkout: Checkout, call: Call) -> Iterator[str]:
    path = checkout.package / call.file
    function = find(path, call.name)
    if function is None or isinstance(function, ast.ClassDef):
        if not imports(path, call.name):
            yield f"nemo_rl/{call.file} has no {call.name}"
        return
    parameters, what = Parameters.of(function), f"{call.name} of nemo_rl/{call.file}"
    if call.positional > len(parameters.positional) and not parameters.any_positional:
        yield f"{what} takes {len(parameters.positional)} arguments by position, {call.positional} are given"
    for name in call.keywords:
        if name not in parameters.names and not parameters.any_keyword:
            yield f"{what} takes no {name}"
    given = {*parameters.positional[: call.positional], *call.keywords}
    if not call.forwards:
        yield from (f"{what} requires {name}" for name in parameters.names if name in parameters.required - given)


def _check_implementation(checkout: Checkout, implementation: Implementation) -> Iterator[str]:
    path = checkout.package / implementation.file
    theirs, ours = (
        methods(find(path, implementation.name)),
        methods(find(PACKAGE / implementation.our_file, implementation.our_name)),
    )
    if not theirs:
        yield f"nemo_rl/{implementation.file} has no {implementation.name}"
    for name, method in theirs.items():
        what = f"{implementation.name}.{name} of nemo_rl/{implementation.file}"
        if name in ours and not name.startswith("__"):
            yield from _check_override(checkout, what, name, Parameters.of(method), Parameters.of(ours[name]))
        elif is_abstract(method) and not implementation.mixin:
            yield f"{what} is abstract, and {implementation.our_name} does not implement it"
    if implementation.mixin:
        for name in ours.keys() - theirs.keys():
            if not name.startswith("__"):
                yield f"{implementation.name} of nemo_rl/{implementation.file} has no {name}"


def _check_override(checkout: Checkout, what: str, name: str, theirs: Parameters, ours: Parameters) -> Iterator[str]:
    for i, parameter in enumerate(theirs.names):
        by_position = i < len(theirs.positional) and (i < len(ours.positional) or ours.any_positional)
        if parameter in ours.names or ours.any_keyword or (by_position and parameter in theirs.required):
            continue
        if parameter in theirs.required or (name, parameter) in passed_keywords(checkout.package):
            yield f"{what} takes {parameter}, which this package's does not"
    for parameter in sorted(ours.required - set(theirs.names)):
        if not (theirs.any_positional or theirs.any_keyword):
            yield f"{what} takes no {parameter}"


@cache
def passed_keywords(package: Path) -> frozenset[tuple[str, str]]:
    """Return (method, keyword) of every call of a method with a keyword in the folders CALLERS."""
    found = set()
    for path in (path for folder in CALLERS for path in (package / folder).rglob("*.py")):
        for node in ast.walk(parse(path) or ast.Module([], [])):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                found |= {(node.func.attr, keyword.arg) for keyword in node.keywords if keyword.arg}
    return frozenset(found)
