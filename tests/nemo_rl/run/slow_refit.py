"""`nemo-fp8rl nemo` whose first refit begins late: python slow_refit.py SECONDS RECIPE [overrides]."""

import sys
import time
from pathlib import Path
from typing import Any

from nemo_fp8rl.nemo_rl.run.run_loop import run
from nemo_fp8rl.refit.bridge import RefitBridge

if __name__ == "__main__":
    seconds, recipe, *overrides = sys.argv[1:]
    refit, left = RefitBridge.refit, [float(seconds)]

    def slow(bridge: RefitBridge) -> Any:
        time.sleep(left.pop() if left else 0)
        return refit(bridge)

    RefitBridge.refit = slow  # type: ignore[method-assign]
    run(Path(recipe), overrides)
