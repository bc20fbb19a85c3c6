"""The registration of our layers with vLLM."""

from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from nemo_fp8rl.generation import vllm_compat
from nemo_fp8rl.generation.fp8_method.shared_ops.experts import SharedMoERunner
from nemo_fp8rl.generation.fp8_method.shared_ops.layers import LAYERS
from nemo_fp8rl.generation.fp8_method.shared_ops.row_parallel import SharedRowParallelLinear

ATTENTION = "nemo_fp8rl.generation.fp8_method.shared_ops.attention.SharedAttentionBackend"
WINDOW_ATTENTION = "nemo_fp8rl.generation.kv_window.shared_ops.WindowSharedBackend"
"""The same where vLLM has windows."""


def register_shared_operations() -> None:
    """Make vLLM build our layers in this process; a second call changes nothing.

    vLLM keeps one class for each name. Raises ValueError where another plugin has taken the name of one of ours.
    """
    classes = {**LAYERS, "MoERunner": SharedMoERunner, "RowParallelLinear": SharedRowParallelLinear}
    for name, layer_class in classes.items():
        registered = op_registry_oot.get(name)
        if registered is None:
            CustomOp.register_oot(layer_class, name=name)
        elif registered is not layer_class:
            raise ValueError(
                f"nemo_fp8rl.align=vllm: another plugin of vLLM has replaced {name} by {registered.__module__}."
                f"{registered.__qualname__}; remove the plugin, or set nemo_fp8rl.align=none"
            )
    has_windows = vllm_compat.has_kv_windows()
    register_backend(AttentionBackendEnum.CUSTOM, WINDOW_ATTENTION if has_windows else ATTENTION)
