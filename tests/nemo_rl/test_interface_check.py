"""Signatures of NeMo RL that this package does not know are named before a worker starts; on a checkout's files."""

import shutil
from pathlib import Path

import pytest

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.nemo_rl.interface_check import CALLERS, CALLS, CALLS_WITH_FP8, check_interface, describe_differences
from nemo_fp8rl.nemo_rl.recipe.checkout import Checkout, find_checkout
from nemo_fp8rl.nemo_rl.recipe.source_signatures import Parameters, find

pytestmark = pytest.mark.nemo_rl


@pytest.fixture
def edited(real_checkout, tmp_path):
    """edited((file, old, new), ...): a copy of the real checkout's package with these changes."""
    package = tmp_path / "nemo_rl"
    shutil.copytree(real_checkout / "nemo_rl", package, ignore=shutil.ignore_patterns("__pycache__"))

    def edit(*changes: tuple[str, str, str]) -> Checkout:
        for file, old, new in changes:
            text = (package / file).read_text()
            assert old in text, f"{file} has no {old!r}"
            (package / file).write_text(text.replace(old, new))
        return Checkout(tmp_path, "9.9.9")

    return edit


@pytest.mark.parametrize("uses_package", [True, False])
def test_the_checkout_has_the_interface_that_this_package_knows(real_checkout, uses_package):
    check_interface(find_checkout(), uses_package)


def test_the_checkout_has_the_single_controller_that_this_package_knows_or_none(real_checkout):
    differences = list(describe_differences(find_checkout(), False, single_controller=True))
    if (real_checkout / "nemo_rl/algorithms/single_controller.py").exists():
        assert differences == []
    else:
        assert "nemo_rl/algorithms/single_controller_utils/setup.py has no setup_single_controller" in differences


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        (("def setup_single_controller(", "def set_up("), "has no setup_single_controller"),
        (("    loss_fn: LossFunction\n", "    loss: LossFunction\n"), "SingleControllerActorArgs of .* has no loss_fn"),
        (("import TQPolicy", "import Policy"), "has no TQPolicy"),
        (
            ("    tokenizer: PreTrainedTokenizerBase,\n    *,", "    tokenizer: str,\n    world: int,\n    *,"),
            "requires world",
        ),
    ],
)
def test_a_future_single_controller_is_named(edited, real_checkout, change, phrase):
    file = "algorithms/single_controller_utils/setup.py"
    if not (real_checkout / "nemo_rl" / file).exists():
        pytest.skip("v0.7.x has no single controller")
    checkout = edited((file, *change))
    check_interface(checkout, False)  # its loops do not mind
    with pytest.raises(UserError, match=phrase):
        check_interface(checkout, False, single_controller=True)


def test_what_is_known_is_read_from_the_checkout(real_checkout):
    """Else the test above could not fail."""
    package = real_checkout / "nemo_rl"
    calls = [*CALLS, *(CALLS_WITH_FP8 if find_checkout().engines_survive_fp8_refit else ())]
    assert all(find(package / call.file, call.name) for call in calls)
    assert all((package / folder).is_dir() for folder in CALLERS)


LM_POLICY, POLICY = "models/policy/lm_policy.py", "models/policy/interfaces.py"
GENERATION, SYNC = "models/generation/interfaces.py", "weight_sync/interfaces.py"


@pytest.mark.parametrize(
    ("change", "uses_package", "phrase"),
    [
        (
            ("algorithms/grpo.py", "def grpo_train(\n    policy", "def grpo_train(\n    universe,\n    policy"),
            True,
            "grpo_train of nemo_rl/algorithms/grpo.py requires master_config",
        ),
        (
            ("algorithms/grpo.py", "policy_factory", "policy_maker"),
            False,
            "setup of nemo_rl/algorithms/grpo.py takes no policy_factory",
        ),
        (("algorithms/utils.py", "def set_seed", "def seed_all"), True, "nemo_rl/algorithms/utils.py has no set_seed"),
        (
            (LM_POLICY, "worker_extension_cls_fqn", "worker_class"),
            False,
            "Policy.__init__ of nemo_rl/models/policy/lm_policy.py takes no worker_extension_cls_fqn",
        ),
        (
            (
                SYNC,
                "    @abstractmethod\n    def shutdown",
                "    @abstractmethod\n    def pause(self): ...\n\n    @abstractmethod\n    def shutdown",
            ),
            True,
            "WeightSynchronizer.pause of nemo_rl/weight_sync/interfaces.py is abstract, and Fp8WeightSynchronizer does "
            "not implement it",
        ),
        (
            (GENERATION, "    def invalidate_kv_cache(self", "    def invalidate_kv_cache(self, layers"),
            True,
            "GenerationInterface.invalidate_kv_cache of nemo_rl/models/generation/interfaces.py takes layers, which "
            "this package's does not",
        ),
    ],
)
def test_a_future_signature_is_named(edited, change, uses_package, phrase):
    checkout = edited(change)
    with pytest.raises(UserError) as refusal:
        check_interface(checkout, uses_package)
    assert f"NeMo RL 9.9.9 with an interface that this package does not know: {phrase}" in str(refusal.value)


def test_the_payload_mode_of_september_is_passed_on(edited):
    """NeMo RL's later `prepare_refit_info(*, refit_payload_mode)` is no difference that a run could fail for."""
    checkout = edited(
        (POLICY, "    def prepare_refit_info(self", "    def prepare_refit_info(self, *, refit_payload_mode"),
        (
            "models/policy/workers/megatron_policy_worker.py",
            "    def prepare_refit_info(self",
            "    def prepare_refit_info(self, *, refit_payload_mode",
        ),
    )
    function = find(checkout.package / POLICY, "ColocatablePolicyInterface.prepare_refit_info")
    assert "refit_payload_mode" in Parameters.of(function).required
    assert [*describe_differences(checkout, True), *describe_differences(checkout, False)] == []


def test_an_optional_parameter_counts_where_nemo_rl_gives_it(edited):
    optional = GENERATION, "    def invalidate_kv_cache(self)", "    def invalidate_kv_cache(self, layers=None)"
    checkout = edited(optional)
    assert list(describe_differences(checkout, True)) == []
    (Path(checkout.root) / "other").mkdir()
    given = Checkout(checkout.root / "other", "9.9.9")
    shutil.copytree(checkout.package, given.package)
    with (given.package / "algorithms/grpo.py").open("a") as file:
        file.write("\n\ndef later(generation):\n    generation.invalidate_kv_cache(layers=1)\n")
    (difference,) = describe_differences(given, True)
    assert "GenerationInterface.invalidate_kv_cache" in difference
