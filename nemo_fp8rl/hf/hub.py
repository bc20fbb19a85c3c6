"""What files a model is, in a folder or under a name of the Hugging Face hub."""

import re
from pathlib import Path

from nemo_fp8rl.errors import UserError

MODEL_FILES = ("config.json", "generation_config.json")
TOKENIZER_FILES = ("*token*.json", "vocab.*", "merges.txt", "tokenizer.model", "chat_template*")
WEIGHTS = "*.safetensors"
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def checkpoint_folder(name: str | Path, key: str = "policy.model_name") -> Path:
    """`name` itself where it is a folder, or can be nothing else; of a name on the hub its folder in the hub's cache
    (HF_HOME), downloaded first unless it is whole there.

    A whole one is taken as it is, so that a run goes on with the revision that it began with. Raises UserError, with
    the key of the recipe, when the model cannot be had.
    """
    folder = Path(name)
    if folder.exists() or not HUB_NAME.fullmatch(str(name)):
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HTTPError

    files = [*MODEL_FILES, *TOKENIZER_FILES, WEIGHTS]
    try:
        try:
            return Path(snapshot_download(str(name), allow_patterns=files, local_files_only=True))
        except OSError:  # not there, or not whole
            return Path(snapshot_download(str(name), allow_patterns=files))
    except (OSError, ValueError, HTTPError) as error:
        why = " ".join(str(error).split())
        raise UserError(
            f"{key}: {name} is no folder here, and the Hugging Face hub does not give a model of that name "
            f"({why[:300]}); give a checkpoint folder, or what the hub asks for: HF_TOKEN, network, a filled HF_HOME"
        ) from None


def revision(name: str | Path) -> str:
    """The commit of a model of the hub that `checkpoint_folder` gives; empty for a folder of one's own."""
    folder = checkpoint_folder(name)
    return "" if folder == Path(name) else folder.name
