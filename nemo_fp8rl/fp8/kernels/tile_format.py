"""The format of a delta that a GPU makes: the changes of each tile of 16 KiB, in parts that lie in any order.

`fp8.delta` lists changes in the order of the bytes and compresses them, which is work for a host. Here the bytes are
cut into tiles, and a GPU handles all tiles at once, so the changes of one tile follow those of another in any order:

    magic "FP8T" | u32 bytes of a tile | u64 bytes of the tensor
    for each tile      u32 start, in bytes of the body | u32 count of changes
    body, by tile      count x u16 offset in the tile, ascending | count x u8 difference | a zero byte if count is odd

all little-endian. A difference is new byte - old byte, modulo 256, and never 0. The parts of the tiles fill the body,
each byte once. Nothing is compressed: where 0.4 % of the bytes change, a message takes 1.25 % of them (3 bytes for a
change, 8 for a tile).

A delta is valid only for the bytes from which it was made, as in `fp8.delta`. There is no checksum: the reader checks
every bound, count and order before the first write, and the refit's digest proves the result. On a GPU a kernel checks
and another one writes, if the first found no fault: no host waits in between, and the verdict is read later.
"""

import struct

from nemo_fp8rl.fp8.delta import MAX_CHANGED

TILE = 1 << 14
"""Bytes of a tile; at most 2**16, because of the offsets."""
HEADER = struct.Struct("<4sIQ")
MAGIC = b"FP8T"
ROW = 8
"""Bytes of a tile in the table."""
MAX_BYTES = 1 << 29
"""Bytes of the largest tensor: the kernels count the body in 32 bits."""


def tiles_of(numel: int) -> int:
    return -(-numel // TILE)


def body_start(numel: int) -> int:
    """Return the bytes of a message before its body."""
    return HEADER.size + ROW * tiles_of(numel)


def body_capacity(numel: int) -> int:
    """Return the bytes of the largest body: above it all bytes are as small to send."""
    return int(3 * MAX_CHANGED * numel) + tiles_of(numel)
