"""The weights in the memory of one engine rank: which it stores, how a version is written, and how that is verified.

The first version goes through vLLM's own loaders (layerwise reload). Where the loaders left the bytes of a tensor
unchanged, at the place that `placement` gives, later versions are written there directly, and deltas are applied in
place. Tensors that vLLM repacks go through its loaders at every refit. No layout is assumed: it is compared once, byte
by byte.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.platforms import current_platform

from nemo_fp8rl.common.region import full_region
from nemo_fp8rl.fp8 import FP8, Fp8Layers
from nemo_fp8rl.fp8.delta import DeltaError
from nemo_fp8rl.generation import vllm_compat
from nemo_fp8rl.generation.fp8_method.fp8_caches import fp8_caches
from nemo_fp8rl.generation.fp8_method.stored_weights import MoEMethod, PlainLinearMethod, QuantizedLinearMethod
from nemo_fp8rl.generation.weights.peer_source import PeerSource
from nemo_fp8rl.generation.weights.placement import Slot, adapter_slots, slots
from nemo_fp8rl.hf.adapters import NO_ADAPTERS
from nemo_fp8rl.hf.model_config import read_hf_config
from nemo_fp8rl.refit.deferred_checks import DeferredChecks, PendingDigest
from nemo_fp8rl.refit.digest import bytes_of
from nemo_fp8rl.refit.expert_stacks import expert_name
from nemo_fp8rl.refit.manifest import RefitError, TensorPart
from nemo_fp8rl.refit.message import Content
from nemo_fp8rl.refit.receiver.offered_places import OfferedPlaces
from nemo_fp8rl.refit.receiver.piece_receiver import IncomingLink, ReceivedPiece, receive_pieces
from nemo_fp8rl.refit.transport.places import Contents, Places

DIRECT: tuple[type, ...] = (QuantizedLinearMethod, MoEMethod, PlainLinearMethod, UnquantizedEmbeddingMethod)
"""Methods whose derived tensors can be computed again from the parameters; a module without a method derives none."""
if current_platform.is_cuda():
    DIRECT += (UnquantizedLinearMethod,)  # on a CPU this method packs its weights


NAN_BYTE = 255
"""A byte that makes NaN in every dtype but E2M1, which has none."""


class WeightStore:
    """Writes versions of the weights into the memory of one engine rank, and verifies them there.

    version:         the last version that was loaded, -1 before the first
    direct_names:    names of the tensors that are written in place; found by the first load
    offered:         the places of these tensors, which trainer ranks that reach this memory write themselves
    verify_seconds:  seconds that the last load spent on digests
    for_peers:       this rank as a source for other engines
    """

    def __init__(self, model_runner: Any) -> None:
        self.runner = model_runner
        self.model: Any = model_runner.get_model()
        config = model_runner.vllm_config
        method = config.quant_config
        fp8_layers = method.fp8_layers if method else Fp8Layers.none()
        format = method.recipe.format if method else FP8
        hf, dtype = read_hf_config(config.model_config.model), config.model_config.dtype
        self.slots = slots(self.model, hf, dtype, fp8_layers, format)
        self.adapter_slots = adapter_slots(self.model, hf, method.adapters if method else NO_ADAPTERS)
        self.all_slots = self.slots | self.adapter_slots
        self.direct_names: frozenset[str] = frozenset(self.adapter_slots)
        self.offered = OfferedPlaces()
        if current_platform.is_cuda() and config.model_config.enable_sleep_mode:
            self.offered.withdraw()  # the addresses stay when it wakes, but not the memory that others have mapped
        self.version = -1
        self.verify_seconds = 0.0
        self.for_peers = PeerSource(model_runner.device)

    @property
    def parts(self) -> list[TensorPart]:
        """The parts of tensors that a refit must bring to this rank."""
        scales = [TensorPart.of(name, torch.float32, ()) for names in fp8_caches(self.model) for name in names]
        return [slot.part for slot in self.all_slots.values()] + scales

    def load(self, links: Sequence[IncomingLink], version: int, verify: bool, with_frozen: bool = True) -> None:
        """Write a version into memory.

        KV scales must be positive numbers, whatever `verify` is.

        verify:  compare the digest of every piece with the trainer's: as it lies in memory, or, for a tensor that vLLM
                 repacks, as it arrived
        with_frozen: tensors that never change come as well
        Raises:  RefitError; memory then holds tensors of two versions and must be filled again
        """
        if version < self.version:
            raise RefitError(f"refit {version} is stale: this engine has had version {self.version}")
        if not with_frozen and self.version < 0:
            raise RefitError(f"refit {version} brings only what changes, and this engine has no version yet")
        self.verify_seconds = 0.0
        self.for_peers.begin_load(with_frozen)
        is_reached = any(link.end.reach is not None for link in links)
        tensors = self._direct_tensors() if self.version >= 0 and is_reached else []
        places = self.offered.open([link.end for link in links], version, tensors, self._direct_contents)
        loading = VersionLoad(self, links, version, verify, with_frozen, places)
        if not self.direct_names.issuperset(loading.due_names):
            vllm_compat.forget_packed_experts(self.model)
            with vllm_compat.preserve_nonpersistent_buffers(self.model):
                self.runner.reload_weights(weights_iterator=loading.for_vllm(), is_checkpoint_format=True)
        elif unwritten := list(loading.for_vllm()):
            raise AssertionError(f"{unwritten[0][0]} is written in place, and came for vLLM's loaders")
        if loading.error is not None:
            raise loading.error
        if self.version < 0:
            self.direct_names |= frozenset(self._find_direct_names(loading.arrived))
        self._derive(loading.written - self.adapter_slots.keys())
        loading.set_kv_scales()
        self.verify_seconds = loading.checks.seconds
        self.version = version

    def compare(self, links: Sequence[IncomingLink], version: int, with_frozen: bool = True) -> None:
        """Raise RefitError, with the name, on a tensor whose bytes in memory differ from those that arrive."""
        kv_scales = stored_kv_scales(fp8_caches(self.model))
        for item in receive_pieces(links, version, with_frozen=with_frozen):
            name = item.part.name
            if name in self.direct_names or name in kv_scales:
                stored = [self._stored(item.part)] if name in self.direct_names else kv_scales[name]
                assert item.content is not None
                if not all(item.content.equals(content) for content in stored):
                    raise RefitError(f"refit {version}: {name} in the engine is not what the trainer holds")

    def contents(self) -> list[tuple[TensorPart, Content]]:
        """Return all parts with views of them in memory. Raises RefitError, with the name, where vLLM repacks one."""
        found: list[tuple[TensorPart, Content]] = []
        kv_scales = stored_kv_scales(fp8_caches(self.model))
        for part in self.parts:
            if part.name in kv_scales:
                found.append((part, kv_scales[part.name][-1]))
            elif part.name in self.direct_names:
                found.append((part, self._stored(part)))
            else:
                raise RefitError(f"vLLM keeps {part.name} in a form of its own, which cannot be passed on")
        return found

    def drop_dequantized(self) -> int:
        """Free the dequantized weights of emulated FP8 layers until their next multiplication, and return the bytes."""
        nbytes = 0
        for layer in self.model.modules():
            if (copies := getattr(layer, "fp8_dequantized", None)) is not None:
                tensors = [copies] if isinstance(copies, Tensor) else [copy for pair in copies for copy in pair]
                nbytes += sum(tensor.nbytes for tensor in tensors)
                layer.quant_method.process_weights_after_loading(layer)
        return nbytes

    def _direct_tensors(self) -> list[Tensor]:
        """Return the tensors of modules that are written in place and share their memory with no other tensor."""
        found = {id(x): x for name in self.direct_names for x in self.all_slots[name].tensors if x.numel()}
        known = {id(x): x for x in chain(self.model.parameters(), self.model.buffers())} | found
        users = Counter(x.untyped_storage().data_ptr() for x in known.values())
        alone = (x for x in found.values() if users[x.untyped_storage().data_ptr()] == 1)
        return [x for x in alone if x.is_cuda or x.untyped_storage().nbytes() == x.nbytes]

    def _direct_contents(self) -> Contents:
        contents = ((name, self.all_slots[name].part, self.all_slots[name].content()) for name in self.direct_names)
        return {name: (part, content) for name, part, content in contents if content is not None}

    def _stored(self, part: TensorPart) -> Content:
        """Return views of the memory that holds a piece."""
        slot = self.all_slots[part.name]
        content = slot.content()
        assert content is not None
        return content.cut(slot.part, part.region)

    def _find_direct_names(self, arrived: dict[TensorPart, PendingDigest]) -> Iterator[str]:
        """Yield the names of tensors that can be written in place: those of modules of which vLLM repacks nothing.

        Raises RefitError where the bytes in memory are not those that arrived: `placement` is then wrong, and nothing
        else would show it.

        arrived:  digests of the pieces that vLLM's loaders got
        """
        checks, modules = DeferredChecks(), defaultdict[nn.Module, list[Slot]](list)
        pieces: dict[str, list[TensorPart]] = defaultdict(list)
        for slot in self.slots.values():
            modules[slot.module].append(slot)
        for part in arrived:
            pieces[part.name].append(part)
        for module, module_slots in modules.items():
            method = getattr(module, "quant_method", None)
            if method is not None and not isinstance(method, DIRECT):
                continue
            for slot in module_slots:
                name = slot.part.name
                text = f"vLLM's own loaders put something else where {name} is looked for in the engine"
                refusal = partial(RefitError, text)
                if slot.content() is None:
                    raise refusal()
                for piece in pieces[name]:
                    checks.check_digest(self._stored(piece), arrived[piece].text, refusal)
                yield name
        checks.finish()

    def _derive(self, names: set[str]) -> None:
        """Compute the derived tensors of the modules of these tensors again.

        A head that is tied to the embedding has a packed copy of it. No weight arrives for the head, so that vLLM's
        reload, too, would leave it with a copy of the first weights.
        """
        head = self.model.lm_head
        modules = {self.slots[name].module for name in names}
        if getattr(self.model.config, "tie_word_embeddings", False):
            modules.add(head)
        for module in modules:
            method = getattr(module, "quant_method", None)
            if method is not None and (module is head or not isinstance(method, UnquantizedEmbeddingMethod)):
                method.process_weights_after_loading(module)


class VersionLoad:
    """The load of one version.

    targets:    by name, the memory of tensors that are written in place
    assembling: by name, tensors for vLLM's loaders of which pieces are still missing
    written:    names of the tensors that were written in place
    arrived:    digests of the pieces for vLLM's loaders, of a first version
    kv_scales:  by name, each with the trainer's digest
    error:      what ended the load
    due_names:  names of the tensors with a slot that come
    """

    def __init__(
        self,
        store: WeightStore,
        links: Sequence[IncomingLink],
        version: int,
        verify: bool,
        with_frozen: bool,
        places: Places | None = None,
    ) -> None:
        self.places = places
        self.store, self.links, self.version, self.verify, self.with_frozen = store, links, version, verify, with_frozen
        # before vLLM takes modules apart
        self.targets = {name: store.all_slots[name].content() for name in store.direct_names}
        parts = (part for link in links for part in link.route if with_frozen or not part.is_frozen)
        self.due_names = {part.name for part in parts} & store.all_slots.keys()
        self.assembling: dict[str, _Assembly] = {}
        self.written: set[str] = set()
        self.arrived: dict[TensorPart, PendingDigest] = {}
        self.kv_scales: dict[str, tuple[Tensor, str]] = {}
        self.checks = DeferredChecks()
        self.error: BaseException | None = None

    def for_vllm(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (HF name, tensor) for vLLM's loaders, and write all other tensors.

        An error is stored and not raised: vLLM must complete its reload, because the next engine in this process shares
        some modules, such as the table of RoPE.
        """
        try:
            modules = {name: slot.module for name, slot in self.store.slots.items() if name not in self.targets}
            for item in receive_pieces(self.links, self.version, modules, self.checks, self.with_frozen, self.places):
                name = item.part.name
                self.store.for_peers.record(item)
                if name in self.targets:
                    self._write(item)
                elif name not in self.store.slots:
                    self._collect_kv_scale(item)
                else:
                    yield from self._assemble(item)
        except (Exception, KeyboardInterrupt) as error:
            self.error = error

    def _write(self, item: ReceivedPiece) -> None:
        whole = self.targets[item.part.name]
        assert whole is not None
        target = whole.cut(self.store.all_slots[item.part.name].part, item.part.region)
        if item.content is not None:
            if not item.is_in_place:
                target.copy_(item.content)
        else:
            assert item.delta is not None
            contiguous = target.data.contiguous()
            try:
                item.delta.apply_(bytes_of(contiguous))
            except DeltaError as error:
                raise RefitError(f"refit {self.version}: {item.part.name}: {error}") from None
            if not target.data.is_contiguous():
                target.data.copy_(contiguous)
            for stored, received in zip((target.scale_inv, target.global_scale), item.scales, strict=True):
                if stored is not None and received is not None:
                    stored.copy_(received)
        self.written.add(item.part.name)
        if self.verify:  # now, while the bytes are in the processor's cache
            self._verify_stored(item.part.name, target, item.digest)

    def _assemble(self, item: ReceivedPiece) -> Iterator[tuple[str, Tensor]]:
        part, content = item.part, self._whole_content(item)
        if self.store.version < 0:
            self.arrived[part] = PendingDigest(item.digest) if self.verify else self.checks.take_digest(content)
        if (assembly := self.assembling.get(part.name)) is None:
            assembly = _Assembly(self.store.slots[part.name].part, content.data.device)
            self.assembling[part.name] = assembly
        if assembly.add(part, content):
            del self.assembling[part.name]
            yield from assembly.tensors()

    def _collect_kv_scale(self, item: ReceivedPiece) -> None:
        name = item.part.name

        def keep(scale: float) -> None:
            if not (math.isfinite(scale) and scale > 0):
                raise RefitError(f"refit {self.version}: {name} is {scale}; a KV scale is finite and above 0")
            self.kv_scales[name] = torch.tensor(scale, dtype=torch.float32), item.digest

        self.checks.read(self._whole_content(item).data, keep)

    def set_kv_scales(self) -> None:
        """Set the scales of FP8 caches; after the weights, because vLLM's reload resets these scales."""
        caches = fp8_caches(self.store.model)
        for names, attention in caches.items():
            vllm_compat.set_kv_scales(attention, *(self.kv_scales[name][0] for name in names))
        if self.verify:
            for name, contents in stored_kv_scales(caches).items():
                for content in contents:
                    self._verify_stored(name, content, self.kv_scales[name][1])
        self.checks.finish()

    def _whole_content(self, item: ReceivedPiece) -> Content:
        """Return the content of a tensor that takes no delta. Raises RefitError for a delta, or damaged bytes."""
        name = item.part.name
        if item.content is None:
            raise RefitError(f"refit {self.version}: a delta of {name}, which must come whole")
        if self.verify:
            text = f"refit {self.version}: {name} was damaged on its way"
            self.checks.check_digest(item.content, item.digest, partial(RefitError, text))
        return item.content

    def _verify_stored(self, name: str, stored: Content, digest: str) -> None:
        text = f"refit {self.version}: {name} in the engine is not what the trainer sent"
        self.checks.check_digest(stored, digest, partial(RefitError, text))


class _Assembly:
    """A tensor for vLLM's loaders. They take it whole and keep this rank's part; the rest is NaN."""

    def __init__(self, part: TensorPart, device: torch.device) -> None:
        self.part, self.missing = part, part.data_bytes
        region = full_region(part.shape)
        if part.is_stack:  # without the experts of other ranks
            region = (part.region[0], *region[1:])
        self.whole = TensorPart(part.name, part.dtype, part.shape, region)
        if part.size != self.whole.size:
            device = torch.device("cpu")  # which has room for the parts of other ranks
        payload = torch.empty(self.whole.nbytes, dtype=torch.uint8, device=device)
        if part.size != self.whole.size:
            payload.fill_(NAN_BYTE)
        self.content = Content.of(self.whole, payload)

    def add(self, piece: TensorPart, content: Content) -> bool:
        """Add a piece; return True when it was the last."""
        place = self.content.cut(self.whole, piece.region)
        for tensor, received in zip(place.tensors, content.tensors, strict=True):
            tensor.copy_(received)
        self.missing -= piece.data_bytes
        return self.missing == 0

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        if not self.part.is_stack:
            yield from self._matrix(self.part.name, self.content)
            return
        for i, expert in enumerate(range(*self.part.region[0])):
            scales, factors = self.content.scale_inv, self.content.global_scale
            matrix = Content(
                self.content.data[i],
                None if scales is None else scales[i],
                None if factors is None else factors[i : i + 1],
            )
            yield from self._matrix(expert_name(self.part.name, expert), matrix)

    def _matrix(self, name: str, content: Content) -> Iterator[tuple[str, Tensor]]:
        format = self.part.format
        yield name, content.data
        if format is not None and content.scale_inv is not None:
            yield format.scale_name(name), content.scale_inv
        if format is not None and content.global_scale is not None:
            yield format.global_name(name), content.global_scale


def stored_kv_scales(caches: Mapping[tuple[str, str, str], Any]) -> dict[str, list[Content]]:
    """Return {name: a KV scale as kernels read it}: the buffer for kernels on GPUs, the number for those on CPUs."""
    scales = {}
    for names, attention in caches.items():
        for name, x in zip(names, "kvq", strict=True):
            number = torch.tensor(getattr(attention, f"_{x}_scale_float"), dtype=torch.float32)
            scales[name] = [Content(getattr(attention, f"_{x}_scale")), Content(number)]
    return scales
