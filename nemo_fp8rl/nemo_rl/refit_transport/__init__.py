"""A checkpoint engine for refits between NeMo RL's own workers: `policy.generation.refit_transport` names its class.

    trainer   `policy_side` quantizes each tensor once, and stores the bytes for the next delta or a repetition
    wire      the links of `refit.transport`; `wire` has the messages, which name their tensors
    engine    `rollout_side` receives and verifies a whole version before vLLM gets the first tensor

NeMo RL gives the trainer's side an iterator of whole tensors in every rank, and the engine's side a call that loads a
batch for good. So nothing is yielded before everything is verified: a failed refit leaves the engine at its version.
Only `checkpoint_engine` imports NeMo RL.
"""
