"""Run directories as one HTML page that needs no network: `nemo-fp8rl report`. Reads files; imports no torch."""
