"""Run `nemo-fp8rl nemo` with engines whose every answer fails.

Usage: python failing_answers.py RECIPE [overrides]
"""

import sys
from typing import Any

from nemo_fp8rl.cli import main
from nemo_fp8rl.generation.engine_pool import EnginePool


def raise_error(self: EnginePool, *arguments: Any) -> Any:
    raise RuntimeError("no answer comes")


if __name__ == "__main__":
    EnginePool.stream = raise_error  # type: ignore[method-assign]
    recipe, *overrides = sys.argv[1:]
    sys.exit(main(["nemo", "--config", recipe, *overrides]))
