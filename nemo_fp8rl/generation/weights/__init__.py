"""The weights of one engine rank: where they lie in vLLM's memory, and how a refit writes them."""
