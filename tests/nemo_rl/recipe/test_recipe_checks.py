"""What NeMo RL's launcher refuses, or starts something else for: refused in its place, whoever's the workers are."""

from pathlib import Path

import pytest

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.nemo_rl.recipe.read_recipe import load_recipe
from nemo_fp8rl.nemo_rl.recipe.recipe_for_train import convert_keys_for_train
from nemo_fp8rl.nemo_rl.run import run_loop
from tests.nemo_rl.conftest import write

RECIPE = "defaults: ${oc.env:NEMO_RL_SRC}/examples/configs/grpo.yaml\n"
KNOWN = """
grpo:
  async_grpo: {enabled: false, max_trajectory_age_steps: 1}
  adv_estimator: {name: grpo}
  batch_multiplier: 1
  skip_reference_policy_logprobs_calculation: false
  use_dynamic_sampling: false
  reward_shaping: {enabled: false, overlong_buffer_length: null, overlong_buffer_penalty: null}
  reward_scaling: {enabled: false}
  stop_at_validation_metric: null
  stop_at_validation_threshold: null
  val_num_generations_per_prompt: 1
  val_period: 0
  val_at_end: false
  val_batch_size: 256
  max_val_samples: 256
loss_fn:
  {positive_example_nll_weight: 0.0, force_on_policy_ratio: false, use_kl_in_reward: false, use_cispo: false,
  reference_policy_kl_penalty: 0.0, truncated_importance_sampling_type: null, truncated_importance_sampling_ratio: null}
data: {use_multiple_dataloader: false, train: {env_name: math}}
policy:
  generation: {temperature: 1.0, val_temperature: 1.0, top_p: 1.0}
  logprob_chunk_size: null
  megatron_cfg: {use_fused_linear_logprobs: false}
  sequence_packing: {enabled: false, train_mb_tokens: 512, logprob_mb_tokens: 512}
  dynamic_batching: {enabled: false, train_mb_tokens: 512, logprob_mb_tokens: 512, sequence_length_round: 64}
data_plane: {enabled: false}
async_rl: {max_weight_staleness_versions: 1}
on_policy_distillation: {enabled: false}
reward_penalties: {penalize_empty_final_answer: false}
checkpointing: {metric_name: null}
env: {should_use_nemo_gym: false, reward_model: {resources: {gpus_per_node: 1, num_nodes: 1}}}
"""
MB_TOKENS = "train_mb_tokens: 512, logprob_mb_tokens: 512"
ASYNC = "++grpo.async_grpo={enabled: true, max_trajectory_age_steps: 1}"
OFF_POLICY = "loss_fn.use_importance_sampling_correction=true"
CONTROLLED = "++async_rl={max_weight_staleness_versions: 2}"
TRANSFER_QUEUE = "++data_plane={enabled: true}"
CONTROLLER = [CONTROLLED, TRANSFER_QUEUE, "++grpo.async_grpo=null"]
ENGINE = "policy.generation.vllm_cfg.async_engine=true"
APART = "policy.generation.colocated.enabled=false"
HALF = "policy.generation.colocated.resources.gpus_per_node=4"
TRUNCATED = "++loss_fn.truncated_importance_sampling_"
FORCED = "++loss_fn.force_on_policy_ratio=true"
FUSED = "++policy.megatron_cfg.use_fused_linear_logprobs=true"
SAVES = "checkpointing.enabled=true"
OF_MATH = "++data.train={env_name: math}"


class Goes(Exception):
    """In place of what comes after the checks."""


@pytest.fixture
def path(checkout: Path, tmp_path: Path, monkeypatch) -> Path:
    """A recipe; whose workers it takes is asked next."""

    def goes(asked: str, flow: str) -> bool:
        raise Goes

    monkeypatch.setattr(run_loop, "uses_package_workers", goes)
    write(checkout / "examples/configs/other.yaml", KNOWN)
    write(checkout / "nemo_rl/algorithms/reads.py", f'"""{KNOWN}"""')
    return write(tmp_path / "recipe.yaml", RECIPE)


@pytest.mark.parametrize("workers", ["ours", "nemo_rl"])
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([ASYNC, "++grpo.use_dynamic_sampling=true"], r"grpo\.use_dynamic_sampling=true .*asynchronous.*to false"),
        ([ASYNC, "++grpo.reward_shaping={enabled: true}"], r"grpo\.reward_shaping\.enabled=true .*asynchronous"),
        ([ASYNC, "++grpo.reward_scaling={enabled: true}"], r"grpo\.reward_scaling\.enabled=true .*asynchronous"),
        ([ASYNC, "++data.use_multiple_dataloader=true"], r"data\.use_multiple_dataloader=true .*asynchronous"),
        ([CONTROLLED, "++grpo.async_grpo=null"], r"async_rl, .*, needs data_plane\.enabled=true"),
        ([CONTROLLED, TRANSFER_QUEUE], r"async_rl, .*, needs grpo\.async_grpo=null"),
        (
            [CONTROLLED, TRANSFER_QUEUE, "++grpo={async_grpo: null, val_period: 5}"],
            r"grpo\.val_period=5: .* set it to 0",
        ),
        (
            [CONTROLLED, TRANSFER_QUEUE, "++grpo={async_grpo: null, val_at_end: true}"],
            r"grpo\.val_at_end=True: .*to Fal",
        ),
        ([*CONTROLLER, "++nemo_fp8rl.mismatch_alarm=stop"], r"nemo_fp8rl\.mismatch_alarm=stop: .* set it to none"),
        ([*CONTROLLER, "++grpo.use_dynamic_sampling=true"], r"grpo\.use_dynamic_sampling=true .*asynchronous"),
        (["++grpo.async_grpo=null"], r"grpo\.async_grpo is null.*set grpo\.async_grpo\.enabled=false"),
        (["++data_plane={enabled: true}"], r"data_plane\.enabled=True needs NeMo RL's loop over TransferQueue"),
        (["++on_policy_distillation={enabled: true}"], r"on_policy_distillation\.enabled=True .*teachers"),
        (["++grpo.adv_estimator={name: opd}"], r"grpo\.adv_estimator\.name=opd needs teachers"),
        (["++env.should_use_nemo_gym=true"], r"env\.should_use_nemo_gym=True .*NeMo Gym's servers"),
        (["++loss_fn.positive_example_nll_weight=0.1"], r"positive_example_nll_weight=0\.1: .*no rewards.*set it to 0"),
        (["++reward_penalties={penalize_empty_final_answer: true}"], r"reward_penalties\.penalize_empty_final_answer"),
        ([SAVES, "++checkpointing.metric_name=accuracy"], r"metric_name=accuracy .* set it to val:accuracy or "),
        (
            ["++grpo={val_period: 5, val_batch_size: null}"],
            r"grpo\.val_batch_size=null is for NeMo Gym",
        ),
        (["++grpo={val_at_start: true, max_val_samples: null}"], r"grpo\.max_val_samples=null is for NeMo Gym"),
        (["++grpo={val_at_end: true, max_val_samples: 16}"], r"=16 is below .*=256: .*set grpo\.val_batch_size=16"),
        (
            ["++grpo.reward_shaping={enabled: true, overlong_buffer_length: 4, overlong_buffer_penalty: null}"],
            r"grpo\.reward_shaping\.overlong_buffer_penalty is missing or null",
        ),
        ([OF_MATH, "++env.math=null"], r"data has env_name=math, and there is no block env\.math: add its keys"),
        ([OF_MATH, "++env.math={num_workers: null}"], r"env\.math\.num_workers is missing or null"),
        (["++grpo.stop_at_validation_metric=accuracy"], r"needs grpo\.stop_at_validation_threshold"),
        (
            ["++grpo.stop_at_validation_metric=pass_k", "++grpo.stop_at_validation_threshold=0.5"],
            r"pass_k needs grpo\.val_num_generations_per_prompt above 1",
        ),
        ([ASYNC, OFF_POLICY, APART, HALF], r"needs policy\.generation\.vllm_cfg\.async_engine=true"),
        ([ASYNC, OFF_POLICY, ENGINE], r"set policy\.generation\.colocated\.enabled=false"),
        ([ASYNC, ENGINE, APART, HALF], r"needs loss_fn\.use_importance_sampling_correction=true"),
        ([APART], r"resources\.gpus_per_node is null.*set it"),
        (["cluster.num_nodes=2", APART, HALF], r"resources\.num_nodes is null, and on 2 nodes .*set it"),
        ([APART, "policy.generation.colocated.resources.gpus_per_node=8"], "takes 8 of .* 8 GPUs .*none to train on"),
        (
            ["++data.train={env_name: reward_model}", "++env.reward_model={resources: {gpus_per_node: 8}}"],
            r"env\.reward_model\.resources takes all",
        ),
        (["++grpo.batch_multiplier=2"], r"grpo\.batch_multiplier needs grpo\.use_dynamic_sampling=true"),
        ([FORCED, "policy.train_global_batch_size=128"], r"set policy\.train_global_batch_size=512, .* of 128"),
        (
            [FORCED, "++loss_fn={use_kl_in_reward: true, reference_policy_kl_penalty: 0.01}"],
            r"use_kl_in_reward needs the log-probs that loss_fn\.force_on_policy_ratio does not compute",
        ),
        (
            [
                "++grpo.skip_reference_policy_logprobs_calculation=true",
                "++loss_fn.reference_policy_kl_penalty=0.01",
            ],
            r"skip_reference_policy_logprobs_calculation=true needs loss_fn\.reference_policy_kl_penalty=0",
        ),
        (
            ["++policy.generation.temperature=1.0", "++policy.generation.val_temperature=0.5"],
            r"val_temperature differs from temperature",
        ),
        ([OFF_POLICY, f"{TRUNCATED}type=tis"], r"_type=tis needs \S*truncated_importance_sampling_ratio above 0"),
        ([OFF_POLICY, f"{TRUNCATED}type=tis", f"{TRUNCATED}ratio=-3"], r"_ratio above 0, got -3\.0"),
        ([OFF_POLICY, f"{TRUNCATED}type=banana", f"{TRUNCATED}ratio=2"], r"_type=banana|_type='banana'"),
        ([FORCED, "++loss_fn.use_cispo=true"], r"loss_fn\.use_cispo contradicts loss_fn\.force_on_policy_ratio"),
        (["++loss_fn.use_cispo=perhaps"], r"loss_fn\.use_cispo='perhaps'"),
        (
            [OFF_POLICY, "+nemo_fp8rl.correction={weight: token}"],
            r"nemo_fp8rl\.correction contradicts loss_fn\.use_importance_sampling_correction",
        ),
    ],
)
def test_what_nemo_rls_loops_do_not_do_is_refused_before_workers_are_asked_for(path, workers, keys, message):
    with pytest.raises(UserError, match=message) as caught:
        run_loop.run(path, [f"+nemo_fp8rl.workers={workers}", *keys])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "keys",
    [
        [],
        [ASYNC, OFF_POLICY, ENGINE, APART, HALF],
        [ASYNC, OFF_POLICY, "++policy.generation.backend=megatron"],  # which is colocated, too
        ["cluster.num_nodes=2", APART, "++policy.generation.colocated.resources={num_nodes: 1, gpus_per_node: 8}"],
        [FORCED],
        [OFF_POLICY, f"{TRUNCATED}type=tis", f"{TRUNCATED}ratio=2"],
        ["+nemo_fp8rl.correction={weight: token}"],
        ["++grpo.use_dynamic_sampling=true", "++grpo.reward_scaling={enabled: true}"],
        ["++loss_fn.positive_example_nll_weight=0.0"],
        [SAVES, "++checkpointing.metric_name=val:accuracy"],
        [SAVES, "++checkpointing.metric_name=null"],
        ["++checkpointing.metric_name=accuracy"],  # of which nothing is asked without checkpoints
        ["++data_plane={enabled: false}", "++on_policy_distillation={enabled: false}"],
        ["++grpo.stop_at_validation_metric=accuracy", "++grpo.stop_at_validation_threshold=0.5"],
    ],
)
def test_what_they_do_is_not(path, keys):
    with pytest.raises(Goes):
        run_loop.run(path, keys)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([], None),
        (
            [
                f"++policy.sequence_packing={{enabled: true, {MB_TOKENS}}}",
                f"++policy.dynamic_batching={{enabled: true, {MB_TOKENS}, sequence_length_round: 64}}",
            ],
            r"policy\.dynamic_batching\.enabled and policy\.sequence_packing\.enabled exclude each other",
        ),
        (["++policy.logprob_chunk_size=1024"], r"needs policy\.megatron_cfg\.defer_fp32_logits=true"),
        # the Megatron block is there, and unused
        (["policy.megatron_cfg.enabled=false", "++policy.logprob_chunk_size=1024"], None),
        (["policy.train_global_batch_size=500"], r"train_global_batch_size=500 does not divide the 512 samples of a"),
        (["policy.train_global_batch_size=4"], r"train_global_batch_size=4 is no multiple of the 8 data-parallel"),
        (["policy.train_micro_batch_size=3"], r"train_micro_batch_size=3 does not divide the 64 samples of a replica"),
        ([FUSED], None),
        ([FUSED, "++policy.generation.top_k=-1", "++policy.generation.top_p=1.0"], None),
        ([FUSED, "++policy.generation.top_k=5"], r"use_fused_linear_logprobs=true does not support top-k or top-p"),
        ([FUSED, "++policy.generation.top_p=0.9"], r"use_fused_linear_logprobs=true does not support top-k or top-p"),
    ],
)
def test_what_nemo_rls_own_workers_assert_is_refused_before_anything_is_loaded(path, monkeypatch, keys, message):
    def goes() -> None:
        raise Goes

    monkeypatch.setattr(run_loop, "uses_package_workers", lambda asked, flow: False)
    monkeypatch.setattr(run_loop, "check_local_gpu", lambda flow: None)
    monkeypatch.setattr(run_loop, "prepare", goes)
    with pytest.raises(UserError if message else Goes, match=message):
        run_loop.run(path, keys)


def test_the_single_controller_has_no_workers_of_this_package(path, monkeypatch):
    monkeypatch.setattr(run_loop, "uses_package_workers", lambda asked, flow: True)
    with pytest.raises(
        UserError, match=r"async_rl is for .* no such client: run it on GPUs with nemo_fp8rl\.workers=ne"
    ):
        run_loop.run(path, CONTROLLER)


def test_our_own_loop_refuses_a_recipe_for_the_single_controller(path):
    recipe = load_recipe(path, ["++async_rl={max_weight_staleness_versions: 2}"]).values
    with pytest.raises(UserError, match="async_rl is for NeMo RL's single controller"):
        convert_keys_for_train(path, recipe)
