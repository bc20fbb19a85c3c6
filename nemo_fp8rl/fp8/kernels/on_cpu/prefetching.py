"""Prefetching for the compiled loops, where the processor's own is late."""

import numba as nb
from llvmlite import ir
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic

from nemo_fp8rl.fp8.kernels.on_cpu.compiled import jit


@intrinsic
def prefetch_line(typing, address):
    """Prefetch the cache line at an address; an invalid address does no harm."""

    def code(context, builder, signature, arguments):
        byte_pointer, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte_pointer, flag, flag, flag])
        function = get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        to_read, close, data = flag(0), flag(3), flag(1)
        builder.call(function, [builder.inttoptr(arguments[0], byte_pointer), to_read, close, data])
        return context.get_dummy_value()

    return nb.void(nb.intp), code


@jit
def prefetch(address, nbytes):
    for line in range(address, address + nbytes, 64):
        prefetch_line(line)
