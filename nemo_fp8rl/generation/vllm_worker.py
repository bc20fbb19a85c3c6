"""The receive side of a refit, inside vLLM's worker (`worker_extension_cls`): verify, then layerwise reload."""

from collections.abc import Sequence
from typing import Any

from safetensors.torch import save
from torch import Tensor, nn
from vllm.model_executor.layers.attention import Attention
from vllm.utils.torch_utils import is_quantized_kv_cache

from nemo_fp8rl.fp8 import Fp8Layers
from nemo_fp8rl.generation import compat
from nemo_fp8rl.generation.routes import RouteRecorder
from nemo_fp8rl.hf.checkpoint import CheckpointReader
from nemo_fp8rl.hf.config import read_hf_config
from nemo_fp8rl.hf.tensors import expected_tensors
from nemo_fp8rl.refit.manifest import RefitError, Update, joined
from nemo_fp8rl.refit.transport import serialized

EXPERT_PROJECTIONS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}
"""What vLLM's stacks of experts hold."""
DEQUANTIZED = ("fp8_dequantized", "w13_dequantized", "w2_dequantized")
"""Attributes of `cpu_kernels` and `cpu_experts`."""


def _dequantized(model: nn.Module) -> list[Tensor]:
    """The copies that the emulated FP8 layers multiply with."""
    layers = [module for module in model.modules() if hasattr(module, "fp8_operand_dtype")]
    copies = [getattr(layer, name) for layer in layers for name in DEQUANTIZED if hasattr(layer, name)]
    return [tensor for copy in copies for tensor in (copy if isinstance(copy, list) else [copy])]


class RefitWorkerExtension:
    """Methods that vLLM mixes into its worker; `self.model_runner` is the worker's own."""

    model_runner: Any
    routes: RouteRecorder
    asleep: list[tuple[Any, int]] = []  # noqa: RUF012, replaced and never changed

    def nemo_fp8rl_load(self, parts: Sequence[Update | bytes]) -> tuple[int, int, str]:
        """(version, bytes received, "") of the update that is now applied, or (-1, 0, why it was refused)."""
        try:
            update = joined([serialized.unpack(part) if isinstance(part, bytes) else part for part in parts])
            self._apply(update)
        except RefitError as error:  # as text: classes do not cross vLLM's process borders
            return -1, 0, str(error)
        return update.manifest.version, update.nbytes, ""

    def _apply(self, update: Update) -> None:
        """Verify, then load. Raises RefitError before a byte is applied."""
        quantization = self.model_runner.vllm_config.quant_config
        fp8_layers = quantization.fp8_layers if quantization else Fp8Layers.none()
        caches = self._fp8_caches()
        kv_scales: dict[str, tuple[int, ...]] = {name: () for names in caches for name in names}
        update.verify(self.nemo_fp8rl_checkpoint_tensors() | kv_scales, fp8_layers)
        weights = {name: tensor for name, tensor in update.tensors.items() if name not in kv_scales}
        compat.forget_packed_experts(self.model_runner.get_model())
        compat.reload_weights(self.model_runner, iter(weights.items()))
        self._repack_tied_head()
        for (k_scale, v_scale), attention in caches.items():
            compat.set_kv_scales(attention, update.tensors[k_scale], update.tensors[v_scale])

    def nemo_fp8rl_read_kv_scales(self) -> str:
        """Take the scales of an FP8 cache from the checkpoint, as the weights; answers what is missing, or ""."""
        with CheckpointReader(self.model_runner.vllm_config.model_config.model) as checkpoint:
            for names, attention in self._fp8_caches().items():
                if missing := [name for name in names if name not in checkpoint.names]:
                    return f"{checkpoint.folder} lacks {missing[0]}, a scale of the FP8 KV cache"
                compat.set_kv_scales(attention, *(checkpoint.get(name) for name in names))
        return ""

    def nemo_fp8rl_sleep(self, level: int) -> int:
        """Free the KV cache, at level 2 the weights too; returns the bytes. Their tensors stay, without memory."""
        storages = [cache.untyped_storage() for cache in self.model_runner.kv_caches] if level else []
        if level == 2:
            model = self.model_runner.get_model()
            tensors = [*model.parameters(), *_dequantized(model)]
            storages += [tensor.untyped_storage() for tensor in tensors]
        freed = {storage.data_ptr(): (storage, storage.nbytes()) for storage in storages if storage.nbytes()}
        for storage, _ in freed.values():
            storage.resize_(0)
        self.asleep = [*self.asleep, *freed.values()]
        return sum(nbytes for _, nbytes in freed.values())

    def nemo_fp8rl_wake(self) -> None:
        """Give what `nemo_fp8rl_sleep` freed its memory again, filled with zeros."""
        for storage, nbytes in self.asleep:
            storage.resize_(nbytes)
            storage.fill_(0)
        self.asleep = []

    def nemo_fp8rl_record_routes(self) -> None:
        """From here on keep the experts of every token until `nemo_fp8rl_take_routes`."""
        hf = read_hf_config(self.model_runner.vllm_config.model_config.model)
        self.routes = RouteRecorder(self.model_runner, hf.num_hidden_layers, hf.num_experts_per_tok)
        compat.record_routes(self.model_runner.get_model(), self.routes)

    def nemo_fp8rl_take_routes(self, wanted: bool) -> bytes:
        """What was kept since the last call (`RouteRecorder.take`) as safetensors; not wanted: forget it."""
        return save(self.routes.take() if wanted else self.routes.forget())

    def _fp8_caches(self) -> dict[tuple[str, str], Any]:
        """{names of the scales that a refit must bring: attention layer} of every layer whose cache is FP8."""
        layers = (
            (name.removesuffix(".attn"), module)
            for name, module in self.model_runner.get_model().named_modules()
            if isinstance(module, Attention) and is_quantized_kv_cache(module.kv_cache_dtype)
        )
        return {(f"{name}.k_scale", f"{name}.v_scale"): module for name, module in layers}

    def _repack_tied_head(self) -> None:
        """A head tied to the embedding receives no weight of its own, so a layerwise reload leaves out what vLLM does
        after loading: on CPU the head would go on with the packed copy that it made of the first weights.
        """
        model = self.model_runner.get_model()
        if model.config.tie_word_embeddings:
            model.lm_head.quant_method.process_weights_after_loading(model.lm_head)

    def nemo_fp8rl_checkpoint_tensors(self) -> dict[str, tuple[int, ...]]:
        """HF name and shape of everything this model loads, scales apart.

        vLLM accepts a load that leaves tensors out, so completeness is checked here: names are those of the model's
        own parameters, fused ones taken apart by the model's own table; shapes are what its config.json implies.
        """
        model = self.model_runner.get_model()
        hf = read_hf_config(self.model_runner.vllm_config.model_config.model)
        shapes = expected_tensors(hf)
        names: set[str] = set()
        for parameter, _ in model.named_parameters():
            if not parameter.endswith("_scale_inv"):
                *path, module, leaf = parameter.split(".")
                parts = model.packed_modules_mapping.get(module, [module])
                if module == "routed_experts":
                    projections, leaf = EXPERT_PROJECTIONS[leaf], "weight"
                    parts = [f"{expert}.{x}" for expert in range(hf.num_experts) for x in projections]
                names |= {".".join([*path, part, leaf]) for part in parts}
        if odd := sorted(names ^ set(shapes)):
            raise RefitError(f"the engine's model and its config.json differ in {len(odd)} tensors, such as {odd[0]}")
        return shapes
