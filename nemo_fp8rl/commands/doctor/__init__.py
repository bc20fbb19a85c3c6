"""`nemo-fp8rl doctor`: what a recipe for NeMo RL asks of its GPUs and of its model, before any of them is touched.

Each room looks at one thing and returns findings: precision, alignment, batches, memory, hardware, workers. Nothing
here needs a GPU or NeMo RL itself, only its checkout; nor torch, unless a recipe asks for our own workers.
"""
