"""What is owed to the version of vLLM alone."""

import sys


def survive_scan_of_llvmlite() -> None:
    """vLLM on CPU, since 0.31, asks every object of every loaded module for its `__dict__` (triton_utils/dispatcher.py,
    _rebind_kernels). llvmlite's library object, there once numba is imported, takes that for a symbol of LLVM and
    answers with a function, on which vLLM fails; its cache of symbols is the place to give a plain answer.
    """
    if ffi := sys.modules.get("llvmlite.binding.ffi"):
        ffi.lib._fntab["__dict__"] = {}
