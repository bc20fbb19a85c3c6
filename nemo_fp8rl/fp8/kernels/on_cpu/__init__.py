"""The contract at memory speed on a CPU, compiled by numba."""
