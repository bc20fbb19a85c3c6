"""`nemo-fp8rl report`: one HTML page about run directories, which needs no network. The package imports no torch."""
