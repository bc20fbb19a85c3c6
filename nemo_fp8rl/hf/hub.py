"""What files a model is, in a folder or under a name of the Hugging Face hub."""

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nemo_fp8rl.common.errors import UserError, one_line
from nemo_fp8rl.config.schema import Config

MODEL_FILES = ("config.json", "generation_config.json")
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json"),
)
WEIGHTS = "*.safetensors"
COMMIT = re.compile("[0-9a-f]{40}")
HUB_NAME = re.compile(r"(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*?)(?:@(?P<revision>[\w.-]+))?")


def checkpoint_folder(name: str | Path, key: str = "policy.model_name", weights: bool = False) -> Path:
    """`name` itself where it is a folder, or can be nothing else. Of a name on the hub, `owner/model` or
    `owner/model@revision`, its folder in the hub's cache (HF_HOME), where what is missing is downloaded first.

    weights: with them; else what is small. Raises UserError, with the key of the recipe, when it cannot be had.
    """
    match = _on_hub(name)
    if match is None:
        return Path(name)
    from huggingface_hub import snapshot_download

    files = [*MODEL_FILES, *TOKENIZER_FILES, *([WEIGHTS] if weights else [])]
    try:
        return Path(snapshot_download(match["repository"], revision=match["revision"], allow_patterns=files))
    except Exception as error:  # the client's have no class in common
        why = f"{type(error).__name__}: {one_line(error)[:300]}"
        raise UserError(
            f"{key}: there is no folder {name} here, and the Hugging Face hub gives no model of that name ({why}); "
            "give a checkpoint folder, or what the hub asks for: HF_TOKEN, network (and HF_HUB_OFFLINE not set), or an "
            "HF_HOME that has it"
        ) from None


def with_commits(cfg: Config, begun: Mapping[str, Any] | None = None) -> Config:
    """The recipe with the commits that its models on the hub have now, so that all nodes take the same.

    begun: by dotted key, what a run that goes on has had them as; a model that is still the same keeps its commit,
    whatever branch is named.
    """
    policy, begun = cfg.policy, begun or {}
    model = _with_commit("policy.model_name", policy.model_name, begun)
    tokenizer = _with_commit("policy.tokenizer.name", policy.tokenizer.name, begun)
    return replace(cfg, policy=replace(policy, model_name=model, tokenizer=replace(policy.tokenizer, name=tokenizer)))


def _with_commit(key: str, name: str, begun: Mapping[str, Any]) -> str:
    match, before = _on_hub(name), str(begun.get(key))
    if match is None:
        return name
    if is_commit_of(before, name):
        if match["revision"] not in (None, before.rpartition("@")[2]):
            logging.getLogger(__name__).warning("%s=%s: the run goes on with %s, as it began", key, name, before)
        return before
    return f"{match['repository']}@{checkpoint_folder(name, key).name}"


def is_commit_of(pinned: str, name: str) -> bool:
    """Whether `pinned`, owner/model@commit, can be what a run made of this name: of that model, and where the name says
    a commit, that one.
    """
    match = _on_hub(name)
    if match is None or not pinned.startswith(f"{match['repository']}@"):
        return False
    return COMMIT.fullmatch(match["revision"] or "") is None or pinned == name


def why_not_on_hub(name: str | Path) -> str:
    """A remark for errors on what would be a name on the hub if no folder of its owner's name were here; else ""."""
    if HUB_NAME.fullmatch(str(name)) is None or Path(name).is_dir() or not (owner := Path(name).parent).is_dir():
        return ""
    return f" (a folder {owner} is here, so the model was looked for in it and not on the hub)"


def _on_hub(name: str | Path) -> re.Match[str] | None:
    """None for what can only be a folder: one that is here, or would be in one that is."""
    match = HUB_NAME.fullmatch(str(name))
    return None if match is None or Path(name).parent.is_dir() else match
