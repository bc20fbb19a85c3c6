"""Advantages, the GRPO loss, rollout correction and mismatch metrics: pure functions of tensors. Needs torch alone."""
