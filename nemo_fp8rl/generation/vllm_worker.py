"""The receive side of a refit, inside vLLM's worker (`worker_extension_cls`): verify, then layerwise reload."""

from typing import Any

from nemo_fp8rl.fp8 import is_quantized, scale_name
from nemo_fp8rl.refit.manifest import Update


class RefitWorkerExtension:
    """Methods that vLLM mixes into its worker; `self.model_runner` is the worker's own."""

    model_runner: Any

    def nemo_fp8rl_load(self, update: Update) -> int:
        """Apply a verified update and return its version. Raises RefitError before a byte is applied."""
        fp8 = self.model_runner.vllm_config.model_config.quantization is not None
        update.verify(self.nemo_fp8rl_checkpoint_names(fp8), fp8)
        self.model_runner.reload_weights(weights_iterator=iter(update.tensors.items()), is_checkpoint_format=True)
        return update.manifest.version

    def nemo_fp8rl_checkpoint_names(self, fp8: bool) -> set[str]:
        """HF names of everything this model loads: its parameters, fused ones taken apart by the model's own table.

        vLLM accepts a load that leaves tensors out, so this list is what completeness is checked against.
        """
        model = self.model_runner.get_model()
        parts = {fused: names for fused, names in model.packed_modules_mapping.items()}
        names: set[str] = set()
        for parameter, _ in model.named_parameters():
            if parameter.endswith("_scale_inv"):
                continue
            *path, module, leaf = parameter.split(".")
            names |= {".".join([*path, part, leaf]) for part in parts.get(module, [module])}
        return names | {scale_name(name) for name in names if fp8 and is_quantized(name)}
