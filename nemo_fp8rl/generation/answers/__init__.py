"""The answers of an engine: who reads them, what vLLM's outputs become, and the experts of their tokens."""
