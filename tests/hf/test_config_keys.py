"""Keys of config.json by which vLLM would go and the trainer not; vLLM's own source says which these are."""

import ast
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_fp8rl.common.vllm_version import vllm_version
from nemo_fp8rl.hf import config_keys
from nemo_fp8rl.hf.model_config import FAMILIES, read_hf_config
from tests.hf.test_hf_files import CONFIG, MIXTURE, refused_config, write_config


@pytest.fixture
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("x")


@pytest.mark.parametrize(
    "changes",
    [
        {"logit_scale": 0.3},
        {"logit_scale": None},
        {"is_causal": False},
        {"is_causal": None},
        {"rotary_pct": 0.5},
        {"rotary_emb_fraction": 0.5},
        {"rotary_emb_base": 10000.0},
        {"dual_chunk_attention_config": {"chunk_size": 64}},
        {"mrope_section": [16, 24, 24]},
        {"attention_chunk_size": 16},
        {"qk_norm": True},
        {"head_dtype": "float32"},
        {"text_config": {"hidden_size": 8}},
        {"per_layer_config": {"0": {"hidden_act": "relu"}}},
        {"num_kv_heads": 1},
        {"shared_expert_intermediate_size": 32},
        {"compression_config": {"quant_method": "compressed-tensors"}},
        {"architectures": ["Qwen3Model"]},
        {"architectures": ["Qwen3ForCausalLM", "Qwen3ForSequenceClassification"]},
        {"max_seq_len": 16},
        {"n_positions": "many"},
    ],
    ids=lambda changes: f"{next(iter(changes))}={str(next(iter(changes.values())))[:12]}",
)
def test_a_key_that_changes_the_engines_model_is_refused_by_its_name(folder, changes):
    assert f"config.json: {next(iter(changes))}=" in refused_config(folder, **changes)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_dim": 32},
        {"mrope_section": [1, 2, 3]},
        {"use_fope": True},
        {"full_attention": {"rope_type": "default", "rope_theta": 1e6}},
        {"attention_factor": 2.0},
    ],
    ids=lambda rope: next(iter(rope)),
)
def test_a_parameter_of_a_rope_that_the_trainer_does_not_have_is_refused(folder, rope):
    name = next(iter(rope))
    for key in ("rope_parameters", "rope_scaling"):
        said = refused_config(folder, **{key: {"rope_type": "default", "rope_theta": 60.0} | rope})
        assert f"config.json: {key}.{name}=" in said


def test_two_types_of_a_rope_are_refused(folder):
    said = refused_config(folder, rope_scaling={"rope_type": "default", "type": "yarn", "factor": 2.0})
    assert "rope_type 'default' and type 'yarn'" in said


def test_a_window_that_vllm_gives_a_llama_at_once_is_refused(folder):
    write_config(folder, sliding_window=16, use_sliding_window=False)
    assert read_hf_config(folder) == read_hf_config(folder)
    assert "sliding_window=16" in refused_config(folder, model_type="llama", sliding_window=16)


def test_a_quantization_beside_config_json_is_refused(folder):
    (folder / "hf_quant_config.json").write_text("{}")
    assert "has hf_quant_config.json" in refused_config(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_values_that_change_nothing_are_taken(folder, family, caplog):
    """Also all that transformers itself writes of a config with its defaults."""
    from transformers import AutoConfig

    sizes = {key: value for key, value in CONFIG.items() if key != "model_type"} | {"head_dim": 12, "dtype": "bfloat16"}
    sizes |= MIXTURE if FAMILIES[family].experts else {}
    sizes.pop("model_type", None)
    AutoConfig.for_model(family, **sizes, architectures=[FAMILIES[family].architecture]).save_pretrained(folder)
    plain = read_hf_config(folder)
    written = json.loads((folder / "config.json").read_text())
    neutral = {key: values[-1] for key, values in config_keys.NEUTRAL.items() if values} | {"max_seq_len": 10**6}
    (folder / "config.json").write_text(json.dumps(written | neutral))
    assert read_hf_config(folder) == plain
    assert caplog.text == ""


def test_a_key_that_nobody_knows_is_named_in_a_warning(folder, caplog):
    write_config(folder, use_wobble=True, also_off=False, also_empty=None)
    read_hf_config(folder)
    assert "config.json sets keys that nothing here reads: use_wobble." in caplog.text


FILES = (
    *(f"model_executor/models/{name}.py" for name in FAMILIES),
    *("transformers_utils/config.py", "transformers_utils/model_arch_config_convertor.py", "config/model.py"),
)
CONFIGS = {"config", "hf_config", "hf_text_config", "text_config"}
NOT_KEYS = {
    # of other objects under such names, and methods
    *(
        "get_text_config",
        "update",
        "standardize_rope_params",
        "validate_rope",
        "to_dict",
        "to_diff_dict",
        "keys",
        "get",
    ),
    *("__dict__", "__class__", "dtype", "config_updated", "revision", "quant_config", "model_type"),
}


def asked_names(path: Path) -> Iterator[str]:
    """Names of attributes that a file of vLLM asks a model's config for."""
    tree = ast.parse(path.read_text())
    if path.name == "model_arch_config_convertor.py":  # the other classes are of other families
        tree = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "ModelArchConfigConvertorBase")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and base(node.value) in CONFIGS:
            yield node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
            named = node.args[1]
            if node.func.id in ("getattr", "hasattr") and base(node.args[0]) in CONFIGS:
                yield from [named.value] if isinstance(named, ast.Constant) else []
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.List | ast.Tuple):
            targets = {target.id for target in node.targets if isinstance(target, ast.Name)}
            if targets & {"names", "attributes", "possible_keys", "num_expert_names"}:  # of getattr_iter
                yield from (entry.value for entry in node.value.elts if isinstance(entry, ast.Constant))


def base(node: ast.expr) -> str | None:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None


@pytest.mark.skipif(vllm_version() != (0, 32), reason="the lists follow the source of vLLM 0.32")
def test_every_key_that_vllm_asks_for_is_in_a_list():
    root = Path(importlib.util.find_spec("vllm").submodule_search_locations[0])
    asked = {name for file in FILES for name in asked_names(root / file)}
    assert {"logit_scale", "is_causal", "rotary_pct", "attention_chunk_size", "num_kv_heads"} <= asked, (
        "nothing is read"
    )
    listed = {
        *config_keys.READ,
        *config_keys.READ_OF_EXPERTS,
        *config_keys.WITHOUT_EFFECT,
        *config_keys.NEUTRAL,
        *config_keys.NEUTRAL_OF_LLAMA,
        *config_keys.LENGTHS,
    }
    assert asked - listed - NOT_KEYS == set()
