"""A loss without its upper clip, which NeMo RL's tests of the loss must reject."""

from dataclasses import replace
from typing import Any

from nemo_fp8rl.nemo_rl.adapters.loss_fn import GrpoLossFn


class BrokenLossFn(GrpoLossFn):
    def __init__(self, cfg: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        self.loss.cfg = replace(self.loss.cfg, ratio_clip_max=1e9)
