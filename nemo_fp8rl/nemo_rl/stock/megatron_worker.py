"""NeMo RL's Megatron worker with `Fp8Stream` mixed in. Only NeMo RL's own GPU environment can import this module."""

import ray
from nemo_rl.models.policy.utils import get_runtime_env_for_policy_worker
from nemo_rl.models.policy.workers.megatron_policy_worker import MegatronPolicyWorkerImpl

from nemo_fp8rl.nemo_rl.stock.fp8_stream import Fp8Stream


@ray.remote(runtime_env=get_runtime_env_for_policy_worker("megatron_policy_worker"))
class Fp8MegatronPolicyWorker(Fp8Stream, MegatronPolicyWorkerImpl):
    pass
