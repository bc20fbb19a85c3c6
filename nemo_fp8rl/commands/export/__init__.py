"""`nemo-fp8rl export`: convert a bfloat16 HF checkpoint to a quantized one that vLLM serves without this package.

The bytes equal those of a refit of the same weights (`refit.sender.checkpoint_form`); a scale of a square block is
repeated for every row of the block, as vLLM's kernels read it. The formats rely on these facts, read in the source of
vLLM 0.32.0, model_executor/layers/quantization:

- `Fp8Config.from_config` (fp8.py) reads `quant_method: fp8`, `activation_scheme`, `weight_block_size` and, without
  `ignored_layers`, `modules_to_not_convert`; it ignores other keys. E4M3 is its only format; `fmt` is written because
  the checkpoints of DeepSeek and Qwen have it.
- With a block size, `Fp8LinearMethod.create_weights` and `Fp8MoEMethod.create_weights` (same file) store the scales as
  float32 `weight_scale_inv` of ceil(N / 128) x ceil(K / 128), which multiply the weight; the loaders of fused layers
  place `q_proj`, `gate_proj`, `experts.3.up_proj` and so on, and their scales, by the names of a bfloat16 checkpoint.
- Every linear layer that is not listed becomes FP8. The router `mlp.gate` is therefore listed too: no checkpoint has
  its scale. `is_layer_skipped` (utils/quant_utils.py) compares whole module names; for a fused module (`qkv_proj`,
  `gate_up_proj`) all parts or none must be listed; the experts of a layer count as one module, `mlp.experts`.
  Embedding, norms and `lm_head` are no `LinearBase`, so vLLM's FP8 does not quantize them; the head is listed for
  transformers, which would convert it, and for vLLM's `modelopt`, which would quantize it.
- The parts of a fused module start at a multiple of 128 rows, and so do the parts of an expert
  (`validate_fp8_block_shape` and `validate_fp8_block_shape_moe`, utils/fp8_utils.py).
- `quant_method: modelopt` (modelopt.py) reads `quant_algo` (MXFP8, NVFP4, W4A16_NVFP4), `ignore` and `group_size`.
  `KMxfp8Static` stores `weight_scale`, uint8 [N, K/32]. `KNvfp4Static` stores packed bytes, `weight_scale`, E4M3
  [N, K/16], and one float32 `weight_scale_2` for each part, of which it takes the largest: parts of a fused module need
  the same. `KNvfp4Dynamic` (NVFP4) also stores a static `input_scale`, the global scale of all activations.

The trainer chooses the global scale of an activation for each token. With power-of-two scales the values do not depend
on it, as long as no block scale saturates and none is below E4M3's normal values. So the static scale 2^-4 gives the
trainer's numbers for blocks whose largest magnitude is from 0.006 to 168; above it vLLM saturates, below it rounds more
coarsely. Our own method ignores the static scale.

`format`, `scale_format` and `fp8_layers` serve this package's method: `LLM(folder, quantization="nemo_fp8rl")`. The
scales of an FP8 KV cache are not exported: they depend on the prompts of a rollout.
"""
