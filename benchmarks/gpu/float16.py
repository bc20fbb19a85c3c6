"""Mismatch without alignment on one GPU: what is not FP8 in bfloat16 and in float16.

    python benchmarks/gpu/float16.py [--seconds 600] [--steps 15] [--folder runs/float16] [--json FILE] [--dry-run]

Each flow (bf16, fp8_e2e, fp8_rollout) trains the tiny warm model with nemo_fp8rl.align=none, in both precisions. What
no time is left for is left out, and said. --dry-run has the smallest sizes, on a CPU with Triton's interpreter.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.align import Measurement
from benchmarks.gpu.report import percent, start

FLOWS = ("bf16", "fp8_e2e", "fp8_rollout")
PRECISIONS = ("bfloat16", "float16")


def compare(measurement: Measurement, flow: str) -> None:
    """Add the lines of a flow: one for each precision, and the ratio of their mismatches."""
    excess: dict[str, float] = {}
    for precision in PRECISIONS:
        if not measurement.report.has_time():
            return
        result = measurement.loop(flow, False, "none", f"policy.precision={precision}")
        if isinstance(result, str):
            measurement.report.fail(f"{flow}, {precision}", RuntimeError(result))
            continue
        excess[precision] = result["token_mult_prob_error"] - 1
        measurement.report.add(
            f"{flow}, {precision}",
            f"token_mult_prob_error {result['token_mult_prob_error']:.6f} (worst {result['worst_step']:.6f}), KL "
            f"{result['gen_kl_error']:.1e}, bit-equal {percent(result['exact_logprob_fraction'])}, skipped steps "
            f"{percent(result['overflow_ratio'])}, step {result['step_seconds']:.3f} s",
            **result,
        )
    if len(excess) == len(PRECISIONS) and excess["bfloat16"]:
        ratio = excess["float16"] / excess["bfloat16"]
        measurement.report.add(f"{flow}, float16 / bfloat16", f"error above 1: {ratio:.3f}", ratio=ratio)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--folder", type=Path, help="keep models and runs here")
    arguments, report = start(parser, 600)
    dry_run = arguments.dry_run
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).resolve()
        measurement = Measurement(report, folder, 2 if dry_run else arguments.steps, dry_run)
        with report.section("the tiny model", report.seconds):
            measurement.make_model()
        for flow in () if report.failures else FLOWS[: 2 if dry_run else None]:
            with report.section(f"the loop: {flow}", report.seconds):
                compare(measurement, flow)
        return report.close(arguments.json)


if __name__ == "__main__":
    sys.exit(main())
