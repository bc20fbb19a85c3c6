"""The files of a model, in a folder or under a name on the Hugging Face hub."""

import json
import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from nemo_fp8rl.common.errors import UserError, single_line
from nemo_fp8rl.config.schema import Config

MODEL_FILES = ("config.json", "generation_config.json")
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json"),
)
WEIGHTS = "*.safetensors"
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
PROBE_SECONDS = 5.0
"""Time in which a hub that can be reached answers; its client would retry for half a minute at every question."""
COMMIT = re.compile("[0-9a-f]{40}")
HUB_NAME = re.compile(r"(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*?)(?:@(?P<revision>[\w.-]+))?")


def checkpoint_folder(name: str | Path, key: str = "policy.model_name", weights: bool = False) -> Path:
    """Return the folder of a model; missing files of a model on the hub are downloaded first.

    name:    a folder, which is returned as it is; or `owner/model` or `owner/model@revision` on the hub, for which the
             folder in the hub's cache (HF_HOME) is returned
    key:     the recipe's key, for messages
    weights: True downloads the weights too, False only the small files
    Raises:  UserError if the model is not available
    """
    match = _match_hub_name(name)
    if match is None:
        return Path(name)
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    repository, revision = match["repository"], match["revision"] or "main"
    stored = Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"
    files = [*MODEL_FILES, *TOKENIZER_FILES, *([WEIGHTS] if weights else [])]

    def download(local_files_only: bool) -> Path:
        return Path(
            snapshot_download(repository, revision=revision, allow_patterns=files, local_files_only=local_files_only)
        )

    if COMMIT.fullmatch(revision):
        if _is_whole(stored / "snapshots" / revision):
            return stored / "snapshots" / revision
        if (stored / "trees" / f"{revision}.json").is_file():  # the client's list of the commit's files
            with suppress(LocalEntryNotFoundError):
                return download(local_files_only=True)
    silence = _why_silent(constants.ENDPOINT, constants.HF_HUB_OFFLINE)
    try:
        return download(local_files_only=bool(silence))
    except Exception as error:  # the errors of the client have no common class
        reason = silence or f"{type(error).__name__}: {single_line(error)[:300]}"
        raise UserError(
            f"{key}: there is no folder {name} here, and the Hugging Face hub gives no model of that name ({reason}); "
            "give a checkpoint folder, or what the hub asks for: HF_TOKEN, network (and HF_HUB_OFFLINE not set), or an "
            "HF_HOME that has it"
        ) from None


def _is_whole(snapshot: Path) -> bool:
    """Return whether a commit's folder in the hub's cache has all files that a run reads.

    Whoever downloads weights downloads the small files with them, so that a folder with all weights has what the model
    has of these; one without weights may lack a file that only the hub knows of.
    """
    if not (snapshot / "config.json").is_file() or not any((snapshot / name).is_file() for name in VOCABULARIES):
        return False
    try:
        weight_map = json.loads((snapshot / "model.safetensors.index.json").read_text())["weight_map"]
    except FileNotFoundError:
        return (snapshot / "model.safetensors").is_file()
    except (OSError, ValueError, LookupError, TypeError):
        return False
    return bool(weight_map) and all((snapshot / str(file)).is_file() for file in set(weight_map.values()))


@cache
def _why_silent(endpoint: str, offline: bool) -> str:
    """Return why the hub is not to be asked, "" where it answers. A process finds out once."""
    from huggingface_hub import get_session

    if offline:
        return "HF_HUB_OFFLINE is set, and it is not in the hub's cache"
    try:
        get_session().head(endpoint, timeout=PROBE_SECONDS)
    except Exception as error:  # of the HTTP client, which is another one in other versions
        return f"{endpoint} does not answer, and it is not in the hub's cache: {single_line(error)[:200]}"
    return ""


def cached_file(name: str, file: str) -> Path | None:
    """Return a file of a model without using the network.

    name: a folder, or `owner/model` or `owner/model@revision`, whose file is taken from the hub's cache (HF_HOME)
    """
    match = _match_hub_name(name)
    if match is None:
        return Path(name) / file
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(match["repository"], file, revision=match["revision"])
    return Path(path) if isinstance(path, str) else None


def pin_commits(cfg: Config, recorded_recipe: Mapping[str, Any] | None = None) -> Config:
    """Return the recipe with the present commits of its models on the hub, so that all nodes use the same files.

    recorded_recipe: values by dotted key of the run that is resumed; a model that is still the same keeps its recorded
                     commit, whatever branch the recipe names
    """
    policy, recorded = cfg.policy, recorded_recipe or {}
    model = _pin_commit("policy.model_name", policy.model_name, recorded)
    tokenizer = _pin_commit("policy.tokenizer.name", policy.tokenizer.name, recorded)
    return replace(cfg, policy=replace(policy, model_name=model, tokenizer=replace(policy.tokenizer, name=tokenizer)))


def _pin_commit(key: str, name: str, recorded_recipe: Mapping[str, Any]) -> str:
    match, recorded = _match_hub_name(name), str(recorded_recipe.get(key))
    if match is None:
        return name
    if is_commit_of(recorded, name):
        if match["revision"] not in (None, recorded.rpartition("@")[2]):
            logging.getLogger(__name__).warning("%s=%s: the run goes on with %s, as it began", key, name, recorded)
        return recorded
    return f"{match['repository']}@{checkpoint_folder(name, key).name}"


def is_commit_of(pinned: str, name: str) -> bool:
    """Return whether `pin_commits` can have made `pinned`, owner/model@commit, from `name`.

    Both must name the same model, and the same commit if `name` has one.
    """
    match = _match_hub_name(name)
    if match is None or not pinned.startswith(f"{match['repository']}@"):
        return False
    return COMMIT.fullmatch(match["revision"] or "") is None or pinned == name


def local_folder_hint(name: str | Path) -> str:
    """Return a hint for errors where `name` would be a hub name if no local folder had its owner's name; else ""."""
    if HUB_NAME.fullmatch(str(name)) is None or Path(name).is_dir() or not (owner := Path(name).parent).is_dir():
        return ""
    return f" (a folder {owner} is here, so the model was looked for in it and not on the hub)"


def split_hub_name(name: str) -> tuple[str, str]:
    """Return `owner/model` and the revision, "" where `name` has none; a folder's resolved name and ""."""
    match = _match_hub_name(name)
    return (str(Path(name).resolve()), "") if match is None else (match["repository"], match["revision"] or "")


def _match_hub_name(name: str | Path) -> re.Match[str] | None:
    """Return the parts of a hub name; None for a folder, that is, for a name whose parent folder exists."""
    match = HUB_NAME.fullmatch(str(name))
    return None if match is None or Path(name).parent.is_dir() else match
