"""The layers that Megatron Core builds the policy from: linears, attention, aligned modules, log-probs."""
