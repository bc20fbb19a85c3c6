"""The generation backend: vLLM with blockwise FP8 layers through its plugin entry point, refitted in place."""
