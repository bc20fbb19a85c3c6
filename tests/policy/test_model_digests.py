"""The values of a model's folder that a resumed run requires to be unchanged."""

import json
import shutil

import pytest

from nemo_fp8rl.commands.tiny_model import write_model
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.hf.model_config import read_hf_config
from nemo_fp8rl.policy.model_digests import model_digests
from nemo_fp8rl.policy.rank.worker import MegatronWorker
from nemo_fp8rl.run.directory import RunDirectory
from tests.policy.test_worker import random_batch, train
from tests.run.test_directory import FakePolicy

PENALTY = "loss_fn.reference_policy_kl_penalty=0.01"


def digests(cfg):
    return model_digests(cfg, read_hf_config(cfg.policy.model_name))


@pytest.mark.parametrize("change", ["rope_theta", "rope_factor", "rms_norm_eps", "eos_token_id"])
def test_digests_tell_models_apart_and_not_folders(recipe, tmp_path, change):
    write_model(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "moved")
    shutil.copytree(tmp_path / "a", tmp_path / "other")
    path = tmp_path / "other/config.json"
    raw = json.loads(path.read_text())
    if change == "rope_theta":
        raw["rope_parameters"]["rope_theta"] = 5e5
    elif change == "rope_factor":
        raw["rope_parameters"] |= {"rope_type": "linear", "factor": 3.0}
    else:
        raw[change] = {"rms_norm_eps": 1e-5, "eos_token_id": [1, 2]}[change]
    path.write_text(json.dumps(raw))
    first, moved, other = (digests(recipe(f"policy.model_name={tmp_path}/{n}")) for n in ("a", "moved", "other"))
    assert first == moved != other
    cfg = recipe(f"policy.model_name={tmp_path}/a")
    with RunDirectory(cfg, resume=False, data=first) as run:
        run.log(1, {"train/reward": 0.5})
        run.save_checkpoint(1, FakePolicy())
    assert RunDirectory(cfg, resume=True, data=moved).completed_steps == 1
    with pytest.raises(UserError, match=r"--resume: the RoPE, .* model are not those .*policy\.model_name"):
        RunDirectory(cfg, resume=True, data=other)


def test_a_step_changes_the_reference_digest(recipe, tmp_path):
    write_model(tmp_path / "model")
    cfg = recipe(f"policy.model_name={tmp_path}/model", PENALTY)
    assert "reference" not in digests(
        recipe(f"policy.model_name={tmp_path}/model", "loss_fn.reference_policy_kl_penalty=0")
    )
    worker = MegatronWorker()
    worker.setup(cfg, 0, 1, None)
    worker.save(str(tmp_path / "start"), optimizer=False)
    assert not (tmp_path / "start/optimizer").exists()
    train(worker, random_batch(0))
    worker.save(str(tmp_path / "step"), optimizer=False)
    start, step = (digests(recipe(f"policy.model_name={tmp_path}/{n}/weights", PENALTY)) for n in ("start", "step"))
    assert start == digests(cfg)
    assert step["model"] == start["model"] and step["reference"] != start["reference"]
