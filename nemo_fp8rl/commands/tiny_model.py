"""A tiny model, tokenizer and dataset: all that the training loop needs, generated in a second.

add     two numbers of two digits         "37+58="         -> "95"
chain   running sums, every step written  "3+8+4="         -> "3+8=11;+4=15"
"""

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from nemo_fp8rl.common.atomic_files import new_folder
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.hf.model_config import FAMILIES, read_hf_config
from nemo_fp8rl.hf.model_tensors import expected_tensors
from nemo_fp8rl.hf.storage.safetensors_file import write_safetensors

SPECIAL = ("<pad>", "<eos>")
CHARACTERS = "0123456789+-= >;"
VOCAB_SIZE = 64
INITIAL_STD = 0.05
FAMILY_SIZES: dict[str, dict[str, int | bool]] = {
    "llama": {},
    "qwen2": {
        "hidden_size": 256,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },  # head_dim is hidden_size / num_attention_heads
    "qwen3": {},
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
        "hidden_size": 128,
    },
}
"""Keys of config.json in which the tiny model of a family differs from the common ones."""
MAX_SEED = 2**63 - 1
CHAIN_PROMPTS, CHAIN_TERMS = 20_000, 6


def make_tiny(folder: Path, task: str, seed: int = 0, family: str = "qwen3", **sizes: Any) -> None:
    """Write folder/model (random, at least 0.8M parameters, with a tokenizer) and folder/data.jsonl, both or neither.

    task:    a key of TASKS
    family:  a key of FAMILY_SIZES
    sizes:   keys of config.json to override
    Raises:  UserError if the folder is not empty or cannot be written, or if an argument is unknown or out of range
    """
    if family not in FAMILY_SIZES:
        raise UserError(f"--family {family}: unknown family; choose one of {', '.join(FAMILY_SIZES)}")
    if task not in TASKS:
        raise UserError(f"--task {task}: unknown task; choose one of {', '.join(TASKS)}")
    if not 0 <= seed <= MAX_SEED:
        raise UserError(f"seed {seed} is out of range; give one from 0 to {MAX_SEED}")
    output = _resolve_new_folder(folder)
    from safetensors import SafetensorError

    with new_folder(output, (OSError, SafetensorError)) as partial:
        write_model(partial / "model", seed, family, **sizes)
        with open(partial / "data.jsonl", "w") as file:
            for prompt, answer in TASKS[task](random.Random(seed)):
                file.write(json.dumps({"prompt": prompt, "answer": answer}) + "\n")


def _resolve_new_folder(folder: Path) -> Path:
    """Return the folder with its links resolved. Raises UserError if no new folder can be made there."""
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise UserError(f"{str(folder)!r} holds bytes that are not UTF-8; give a folder with another name") from None
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; give a new folder")
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty; give a new folder, nothing is overwritten")
    resolved_folder = Path(os.path.realpath(folder))
    if resolved_folder == Path(os.path.realpath(".")):
        raise UserError(f"{folder} is the working directory; give a new folder")
    return resolved_folder


def write_model(folder: Path, seed: int = 0, family: str = "qwen3", device: str = "cpu", **sizes: Any) -> None:
    """Write a randomly initialized bfloat16 checkpoint with a tokenizer.

    device:  the device that draws the random numbers; a GPU draws other numbers than a CPU, and billions quickly
    sizes:   keys of config.json to override
    """
    from transformers import AutoConfig

    folder.mkdir(parents=True)
    config = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "intermediate_size": 512,
        "tie_word_embeddings": False,
        "max_position_embeddings": 256,
        **FAMILY_SIZES[family],
        **sizes,
    }
    AutoConfig.for_model(
        family,
        **config,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        dtype="bfloat16",
        architectures=[FAMILIES[family].architecture],
    ).save_pretrained(folder)
    _save_tokenizer(folder)
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {
        name: torch.ones(shape, dtype=torch.bfloat16)
        if name.endswith("norm.weight")
        else (torch.randn(shape, generator=generator, device=device) * INITIAL_STD).bfloat16().cpu()
        for name, shape in expected_tensors(read_hf_config(folder)).items()
    }
    write_safetensors(tensors, folder / "model.safetensors")


def _save_tokenizer(folder: Path) -> None:
    """Write a tokenizer with one token per character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=SPECIAL[0], eos_token=SPECIAL[1])
    try:
        fast.save_pretrained(folder)
    except Exception as error:  # tokenizers raises a plain Exception if a file cannot be written
        if type(error) is not Exception:
            raise
        raise OSError(str(error)) from None


def _make_additions(rng: random.Random) -> Iterator[tuple[str, str]]:
    problems = [(f"{a}+{b}=", str(a + b)) for a in range(10, 100) for b in range(10, 100)]
    rng.shuffle(problems)
    yield from problems


def make_chains(rng: random.Random, terms: int = CHAIN_TERMS, count: int = CHAIN_PROMPTS) -> Iterator[tuple[str, str]]:
    """Yield `count` distinct running sums of `terms` digits; an answer has about 6 (terms - 1) characters."""
    seen: set[tuple[int, ...]] = set()
    while len(seen) < count:
        digits = tuple(rng.randrange(10) for _ in range(terms))
        if digits in seen:
            continue
        seen.add(digits)
        total, steps = digits[0], []
        for digit in digits[1:]:
            total += digit
            steps.append(f"+{digit}={total}")
        yield "+".join(map(str, digits)) + "=", str(digits[0]) + ";".join(steps)


TASKS: dict[str, Callable[[random.Random], Iterator[tuple[str, str]]]] = {"add": _make_additions, "chain": make_chains}
