"""An update as one safetensors file in memory: what crosses process borders. Nothing is unpickled from it."""

import json
import struct

from safetensors import SafetensorError
from safetensors.torch import load, save

from nemo_fp8rl.refit.manifest import Manifest, RefitError, Update

MANIFEST_KEY = "manifest"


def pack(update: Update) -> bytes:
    """Tensors and manifest in the safetensors format; its header carries the manifest as JSON."""
    return save(update.tensors, metadata={MANIFEST_KEY: update.manifest.to_json()})


def unpack(payload: bytes) -> Update:
    """The inverse of `pack`. Raises RefitError when the bytes are not a whole update."""
    try:
        (header_size,) = struct.unpack_from("<Q", payload)
        metadata = json.loads(payload[8 : 8 + header_size])["__metadata__"]
        return Update(Manifest.from_json(metadata[MANIFEST_KEY]), load(payload))
    except (SafetensorError, struct.error, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise RefitError(f"the refit payload of {len(payload)} bytes is damaged ({error})") from None
