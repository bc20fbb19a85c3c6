"""Triton's kernels on a CPU, value by value, rounding as a GPU does."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch


class FakeDriver:
    @staticmethod
    def is_active() -> bool:
        return True

    def get_benchmarker(self) -> Callable[..., list[float]]:
        """Of kernels that Triton tunes, the first choice is the quickest: each would be interpreted otherwise."""
        return lambda call, quantiles: [0.0 for _ in quantiles]


def interpret() -> None:
    """Before anything defines kernels. What is fake: that this machine has a backend for Triton."""
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.backends
    import triton.language as tl
    from triton.backends.compiler import BaseBackend
    from triton.runtime import driver, interpreter

    cast, convert = interpreter.InterpreterBuilder.cast_impl, interpreter._convert_float

    def round_to_nearest(builder: Any, source: Any, dtype: Any) -> Any:
        """The interpreter's cast, which cuts float32 off where bfloat16 ends."""
        if (source.dtype.scalar, dtype.scalar) != (tl.float32, tl.bfloat16):
            return cast(builder, source, dtype)
        rounded = torch.from_numpy(source.data.copy()).bfloat16().view(torch.int16).numpy()
        return interpreter.TensorHandle(rounded.view("uint16"), dtype.scalar)

    def convert_e4m3(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        """The interpreter's conversion, which rounds halves up, carries nothing, and does not saturate.

        Of what it multiplies it gives the same number, and takes most of its time for that.
        """
        if (source, target) == (tl.float8e4nv, tl.float16):
            return torch.from_numpy(values.copy()).view(torch.float8_e4m3fn).half().numpy()
        if (source, target) == (tl.float32, tl.float8e4nv):
            saturated = torch.from_numpy(values.copy()).clamp(-448.0, 448.0)
            return saturated.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return convert(values, source, target, rounding)

    dot = interpreter.InterpreterBuilder.create_dot

    def multiply_bfloat16(builder: Any, a: Any, b: Any, *further: Any) -> Any:
        """The interpreter's product, which takes the bits of bfloat16 for whole numbers."""
        if a.dtype.scalar == b.dtype.scalar == tl.bfloat16:
            a, b = (interpreter.TensorHandle(_widen(operand.data), tl.float32) for operand in (a, b))
        return dot(builder, a, b, *further)

    call, thread = interpreter.GridExecutor.__call__, ThreadPoolExecutor(1)

    def call_on_a_short_stack(executor: Any, *args: Any, **kwargs: Any) -> None:
        """Deep in vLLM's calls the frames of Python 3.11 may be at the end of a 16 KiB chunk, and each of the millions
        of calls that a kernel is here then maps another one and gives it back: half of the time.
        """
        inference = torch.is_inference_mode_enabled()

        def run() -> None:
            with torch.inference_mode(inference):
                call(executor, *args, **kwargs)

        thread.submit(run).result()

    interpreter.GridExecutor.__call__ = call_on_a_short_stack
    interpreter.InterpreterBuilder.cast_impl = round_to_nearest
    interpreter.InterpreterBuilder.create_fp_trunc = round_to_nearest
    interpreter.InterpreterBuilder.create_dot = multiply_bfloat16
    interpreter._convert_float = convert_e4m3
    triton.backends.backends["cpu"] = triton.backends.Backend(driver=FakeDriver, compiler=BaseBackend)
    driver.set_active(FakeDriver())


def lengthen_steps() -> None:
    """Let the kernels of digests and deltas take many words at a time: a step costs the interpreter the same."""
    from nemo_fp8rl.fp8.kernels import triton_digest, triton_tiles

    triton_digest.WORDS, triton_tiles.WORDS = 1 << 14, triton_tiles.TILE // triton_tiles.WORD


def _widen(bits: Any) -> Any:
    """float32 of bfloat16, given as uint16."""
    return (bits.astype("uint32") << 16).view("float32")
