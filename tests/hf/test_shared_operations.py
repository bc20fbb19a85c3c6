"""What alignment on a GPU refuses, each with the key that mends it."""

import pytest

from nemo_fp8rl.commands.tiny_model import write_model
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.hf.model_config import read_hf_config
from nemo_fp8rl.hf.shared_operations import check_shared_operations, operation_shapes

ENGINE, TRAINER = "policy.generation.vllm_cfg.", "policy.megatron_cfg."
RANKS = ("cluster.backend=ray", "cluster.train_ranks=4", "policy.train_micro_batch_size=16")
TP2 = (f"{ENGINE}tensor_parallel_size=2", f"{TRAINER}tensor_model_parallel_size=2", f"{TRAINER}sequence_parallel=true")
TP4 = tuple(key.replace("size=2", "size=4") for key in TP2)
EP2, ETP1 = f"{ENGINE}expert_parallel_size=2", f"{TRAINER}expert_tensor_parallel_size=1"
FLASH_IN_WINDOW = (f"{ENGINE}attention_backend=FLASH_ATTN", f"{ENGINE}kv_window=64")
EXPERTS = ("qwen3_moe", (*RANKS, *TP2, EP2, ETP1, f"{TRAINER}expert_model_parallel_size=2"))


@pytest.fixture
def load(recipe, tmp_path):
    def load(family, keys):
        write_model(tmp_path / family, family=family)
        cfg = recipe(f"policy.model_name={tmp_path}/{family}", *keys)
        return read_hf_config(cfg.policy.model_name), cfg

    return load


@pytest.mark.parametrize(("family", "keys"), [("qwen3", (*RANKS, *TP4)), EXPERTS], ids=["tp4", "experts"])
def test_equal_tensor_parallelism_and_whole_experts_are_aligned(load, family, keys):
    check_shared_operations(*load(family, keys))


@pytest.mark.parametrize(
    ("family", "keys", "fix"),
    [
        ("qwen3", (*RANKS, TP2[1]), "set both to one size, or nemo_fp8rl.align=none"),
        ("qwen3_moe", (*RANKS, *TP2, ETP1), f"set {EP2}"),
        ("qwen3_moe", (*RANKS, *TP2, EP2), f"set {ETP1}"),
        ("qwen3", ("nemo_fp8rl.flow=nvfp4_e2e",), "set nemo_fp8rl.align=none"),
        ("qwen3", FLASH_IN_WINDOW, "both sides take their shared kernel, or nemo_fp8rl.align=none"),
        ("qwen3", (*FLASH_IN_WINDOW, "nemo_fp8rl.kv=rollout"), "their shared kernel, or nemo_fp8rl.align=none"),
    ],
    ids=["unequal", "engine shares experts", "trainer shares experts", "format", "window", "window of the engine"],
)
def test_what_is_not_aligned_is_refused_with_its_fix(load, family, keys, fix):
    with pytest.raises(UserError, match=r"^nemo_fp8rl\.align=vllm: .* is not aligned on a GPU; set ") as refusal:
        check_shared_operations(*load(family, keys))
    assert str(refusal.value).endswith(fix)


def test_ranks_of_an_engine_share_every_matrix_but_those_of_experts(load):
    assert operation_shapes(*load(*EXPERTS)).matrices["down"] == (128, 128)
    assert operation_shapes(*load("qwen3", (*RANKS, *TP2))).matrices["down"] == (128, 256)
