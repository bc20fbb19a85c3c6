"""Run `nemo-fp8rl nemo` with refits that fail from the refit NUMBER on, counted from 1.

Usage: python failing_refit.py NUMBER RECIPE [overrides]
"""

import sys
from pathlib import Path
from typing import Any

from nemo_fp8rl.nemo_rl.run.run_loop import run
from nemo_fp8rl.refit.bridge import RefitBridge

if __name__ == "__main__":
    number, recipe, *overrides = sys.argv[1:]
    refit, countdown = RefitBridge.refit, [int(number)]

    def fail_later(bridge: RefitBridge) -> Any:
        countdown[0] -= 1
        if countdown[0] <= 0:
            raise RuntimeError("this refit fails")
        return refit(bridge)

    RefitBridge.refit = fail_later  # type: ignore[method-assign]
    run(Path(recipe), overrides)
