"""Weights from a trainer to engines: what a complete refit is, and how it travels. Knows neither Megatron nor vLLM."""
