"""`nemo-fp8rl nemo` whose refits fail from one of them on: python failing_refit.py NUMBER RECIPE [overrides]."""

import sys
from pathlib import Path
from typing import Any

from nemo_fp8rl.nemo_rl.run.run_loop import run
from nemo_fp8rl.refit.bridge import RefitBridge

if __name__ == "__main__":
    number, recipe, *overrides = sys.argv[1:]
    refit, left = RefitBridge.refit, [int(number)]

    def failing(bridge: RefitBridge) -> Any:
        left[0] -= 1
        if left[0] <= 0:
            raise RuntimeError("this refit fails")
        return refit(bridge)

    RefitBridge.refit = failing  # type: ignore[method-assign]
    run(Path(recipe), overrides)
