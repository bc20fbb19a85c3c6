"""The package's GPU paths on a CPU, for dry runs: Triton's interpreter, and the fakes of tests/gpu_engine.

    python benchmarks/gpu/interpreted.py train --config conf/tiny_cpu.yaml ...     as `nemo-fp8rl train ...`

It needs the packages of the tests (`make setup-dev`). The figures of a dry run say nothing about a GPU.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The folder of the source tree, from which scripts import `benchmarks`, and dry runs `tests`."""


def prepare() -> None:
    """Let Triton's interpreter run kernels on this CPU, and make recipes believe that there is a GPU.

    Call it before anything defines Triton kernels or imports vLLM.
    """
    sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "benchmarks")) if path not in sys.path]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from tests.gpu_engine import plugin

    plugin.pytest_sessionstart()
    from nemo_fp8rl.ops import alignment

    alignment.has_gpu = lambda: True


if __name__ == "__main__":
    prepare()
    from nemo_fp8rl.cli import main

    sys.exit(main())
