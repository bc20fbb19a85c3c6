"""Log-probs of an aligned engine's samples: torch's division by the temperature, and the shared log-softmax.

vLLM has two model runners. The sampler of the first computes log-probs for greedy tokens in one place, and behind top-k
and top-p in another. That of the second (v1/worker/gpu/sample) divides by a kernel whose quotients are not IEEE's, and
takes log-probs of few tokens by a kernel with other sums. Only this engine's sampler is changed.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nemo_fp8rl.ops.log_softmax import log_softmax


def share_log_probs(model_runner: Any) -> None:
    """Have a model runner that is complete, and returns processed log-probs, take them from `ops.log_softmax`."""
    sampler = model_runner.sampler
    if hasattr(sampler, "topk_topp_sampler"):
        _share_in_first_runner(sampler)
    else:
        model_runner.sampler = SharedSampler(sampler)


def _share_in_first_runner(sampler: Any) -> None:
    step = sampler.topk_topp_sampler
    step.logprobs_mode, forward = "processed_logits", step.forward

    def forward_with_log_softmax(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        sampled, logits = forward(*args, **kwargs)
        return sampled, log_softmax(logits)

    step.forward, sampler.compute_logprobs = forward_with_log_softmax, log_softmax


class SharedSampler:
    """The second model runner's sampler with other log-probs."""

    def __init__(self, sampler: Any) -> None:
        self.sampler, self.sample = sampler, sampler.sample
        self.processed_logits: Tensor | None = None
        self.temperatures = sampler.sampling_states.temperature
        sampler.sample = self._keep_logits
        sampler.sampling_states.apply_temperature = self._divide

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sampler, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.sampler(*args, **kwargs)
        logits, self.processed_logits = self.processed_logits, None
        scores = output.logprobs_tensors
        if scores is None or logits is None:
            return output
        logprobs = log_softmax(logits.float()).gather(1, scores.logprob_token_ids.long())
        return replace(output, logprobs_tensors=scores._replace(logprobs=logprobs))

    def _keep_logits(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        sampled, self.processed_logits = self.sample(*args, **kwargs)
        return sampled, self.processed_logits

    def _divide(self, logits: Tensor, request_of_row: Tensor, requests: Any) -> None:
        """Divide each row, in place, by its request's temperature; a greedy request has 0 and stays as it is."""
        temperature = self.temperatures.gpu[request_of_row]
        logits.div_(torch.where(temperature == 0, 1.0, temperature).unsqueeze(1))
