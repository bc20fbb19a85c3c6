"""Makes vLLM's outputs into completions: tokens, log-probs, experts, and the version of the weights of each token."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nemo_fp8rl.batch import Completion


def completions_of(
    output: Any, version: int, logprobs: bool, routes: Mapping[str, Tensor], is_labelled: bool
) -> list[Completion]:
    """Return the completions of one prompt.

    output:       vLLM's RequestOutput of a request that is complete
    version:      the version that the engine had when it took the request
    logprobs:     take the log-probs, which were asked for
    routes:       experts by vLLM's id of the request, where a recorder has them
    is_labelled:  vLLM has labelled tokens with versions, as after `AsyncCore.resume`
    """
    return [_completion(output, sample, version, logprobs, routes, is_labelled) for sample in output.outputs]


def _completion(
    output: Any, sample: Any, version: int, logprobs: bool, routes: Mapping[str, Tensor], is_labelled: bool
) -> Completion:
    token_ids = tuple(sample.token_ids)
    if sample.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"the engine ended a completion by {sample.finish_reason!r}")
    entries = zip(sample.logprobs, token_ids, strict=True) if logprobs else ()
    per_token = tuple(entry[token].logprob for entry, token in entries)
    route = _routes_of(sample, routes.get(_request_id(output, sample)))
    starts = _version_starts(sample, version) if is_labelled else ()
    return Completion(token_ids, per_token, sample.finish_reason, version, route, starts)


def _version_starts(sample: Any, version: int) -> tuple[tuple[int, int], ...]:
    """Return `Completion.version_starts` of a sample, from the spans that vLLM labelled.

    vLLM's core labels tokens as it takes them from the sampler, and a label changes only while no token is computed
    (`AsyncCore.pause`). So no token has the label of weights that did not produce it.
    """
    spans = sample.weight_versions or []
    if (spans[-1].end if spans else 0) != len(sample.token_ids):
        raise RuntimeError(f"vLLM did not label every token of an answer with its version: {spans}")
    starts = tuple((span.start, int(span.version)) for span in spans)
    return () if all(label == version for _, label in starts) else starts


def _routes_of(sample: Any, recorded: Tensor | None) -> Tensor | None:
    """Return the experts of a sample, int16 [tokens, layers, top k]: as vLLM returned them, else as recorded."""
    chosen = sample.routed_experts
    return recorded if chosen is None else torch.from_numpy(chosen.astype(np.int16))


def _request_id(output: Any, sample: Any) -> str:
    """Return vLLM's id of the request for one sample of a prompt (`ParentRequest.get_child_info`)."""
    return f"{sample.index}_{output.request_id}" if len(output.outputs) > 1 else output.request_id
