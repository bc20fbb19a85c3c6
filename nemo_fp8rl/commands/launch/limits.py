"""Ranges of the numbers of a site file. A wrong number would switch a check off, or end a job that already runs."""

from nemo_fp8rl.common.field_rules import Range

YEAR = 366 * 24 * 3600
"""Seconds in a leap year."""
MOST = 100_000
"""The largest number of nodes, CPUs or attempts; no cluster has as many."""
COUNT, COUNT_OR_0 = Range(at_least=1, at_most=MOST), Range(at_least=0, at_most=MOST)
GPUS = Range(at_least=0, at_most=1024)
SECONDS, SECONDS_OR_0 = Range(at_least=1, at_most=YEAR), Range(at_least=0, at_most=YEAR)
ID = Range(at_least=0, at_most=2**31 - 1)
"""A user or group, to Kubernetes."""
