"""Run `nemo-fp8rl nemo` with a first refit that starts SECONDS late.

Usage: python slow_refit.py SECONDS RECIPE [overrides]
"""

import sys
import time
from pathlib import Path
from typing import Any

from nemo_fp8rl.nemo_rl.run.run_loop import run
from nemo_fp8rl.refit.bridge import RefitBridge

if __name__ == "__main__":
    seconds, recipe, *overrides = sys.argv[1:]
    refit, delays = RefitBridge.refit, [float(seconds)]

    def refit_slowly(bridge: RefitBridge) -> Any:
        time.sleep(delays.pop() if delays else 0)
        return refit(bridge)

    RefitBridge.refit = refit_slowly  # type: ignore[method-assign]
    run(Path(recipe), overrides)
