// A CUDA device whose memory is the host's and whose kernels are the CPU's, so that torch of a CPU build keeps apart
// what is on the one and what on the other. Operators that CUDA refuses for operands on two devices are refused here.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceType;
using c10::IValue;

const Device kDevice(DeviceType::CUDA, 0);
const c10::DispatchKeySet kKeys(c10::DispatchKey::CUDA);
std::atomic<int64_t> allocated{0};

int64_t rounded(size_t nbytes) { return (nbytes + 511) / 512 * 512; }

struct Guard final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device getDevice() const override { return kDevice; }
  Device exchangeDevice(Device) const override { return kDevice; }
  c10::Stream getStream(Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::Stream getNewStream(Device, int) const override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Memory final : c10::Allocator {
  struct Block {
    void* data;
    int64_t nbytes;
  };
  static void give(void* context) {
    auto* block = static_cast<Block*>(context);
    allocated -= block->nbytes;
    std::free(block->data);
    delete block;
  }
  c10::DataPtr allocate(size_t nbytes) override {
    if (!nbytes) return c10::DataPtr(nullptr, kDevice);
    auto* block = new Block{std::aligned_alloc(512, rounded(nbytes)), rounded(nbytes)};
    TORCH_CHECK(block->data, "no memory for ", nbytes, " bytes");
    allocated += block->nbytes;
    return c10::DataPtr(block->data, block, &give, kDevice);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { default_copy_data(to, from, nbytes); }
};
Memory memory;
REGISTER_ALLOCATOR(DeviceType::CUDA, &memory);

// Of the host, and known by its address: `is_pinned`.
struct Pinned final : c10::Allocator {
  static inline std::mutex mutex;
  static inline auto& known = *new std::unordered_set<const void*>;  // outlives what is freed at the very end
  static bool is_one(const void* data) {
    std::lock_guard<std::mutex> held(mutex);
    return known.count(data) > 0;
  }
  static void give(void* data) {
    {
      std::lock_guard<std::mutex> held(mutex);
      known.erase(data);
    }
    std::free(data);
  }
  c10::DataPtr allocate(size_t nbytes) override {
    void* data = nbytes ? std::aligned_alloc(512, rounded(nbytes)) : nullptr;
    TORCH_CHECK(data || !nbytes, "no memory for ", nbytes, " bytes");
    std::lock_guard<std::mutex> held(mutex);
    if (data) known.insert(data);
    return c10::DataPtr(data, data, &give, Device(DeviceType::CPU));
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { default_copy_data(to, from, nbytes); }
};
Pinned pinned;

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  int getNumGPUs() const override { return 1; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static at::Generator generator = at::detail::createCPUGenerator();
    return generator;
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  bool isPinnedPtr(const void* data) const override { return Pinned::is_one(data); }
  Device getDeviceFromPtr(void*) const override { return kDevice; }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)

// A storage's memory under another device's name. What a CPU kernel made counts as the device's while it lives.
struct Kept {
  c10::Storage storage;
  int64_t counted;
  static void give(void* context) {
    auto* kept = static_cast<Kept*>(context);
    allocated -= kept->counted;
    delete kept;
  }
};

c10::DataPtr renamed(const c10::Storage& storage, Device device) {
  auto* kept = new Kept{storage, device.is_cuda() ? rounded(storage.nbytes()) : 0};
  allocated += kept->counted;
  return c10::DataPtr(const_cast<void*>(storage.data()), kept, &Kept::give, device);
}

c10::Storage as(Device device, c10::Allocator* allocator, const c10::Storage& storage) {
  return c10::Storage(
      c10::Storage::use_byte_size_t(), storage.nbytes(), renamed(storage, device), allocator, /*resizable=*/true);
}

Tensor over(c10::Storage storage, c10::DispatchKeySet keys, const Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) impl->_set_conj(true);
  if (like.is_neg()) impl->_set_neg(true);
  return made;
}

// Tensors of one call, as the CPU sees them.
struct Seen {
  std::unordered_map<c10::TensorImpl*, Tensor> cpu_of;              // ours -> the CPU's
  std::unordered_map<c10::TensorImpl*, Tensor> ours;                // the CPU's -> ours
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages;     // ours -> the CPU's
  std::unordered_map<c10::StorageImpl*, c10::Storage> origins;      // the CPU's -> ours

  Tensor cpu(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    auto* key = tensor.unsafeGetTensorImpl();
    if (auto found = cpu_of.find(key); found != cpu_of.end()) return found->second;
    const auto& storage = tensor.storage();
    auto* under = storage.unsafeGetStorageImpl();
    if (!storages.count(under)) {
      storages[under] = as(Device(DeviceType::CPU), c10::GetAllocator(DeviceType::CPU), storage);
      origins[storages[under].unsafeGetStorageImpl()] = storage;
    }
    Tensor made = over(storages[under], c10::DispatchKeySet(c10::DispatchKey::CPU), tensor);
    cpu_of[key] = made;
    ours[made.unsafeGetTensorImpl()] = tensor;
    return made;
  }

  // After the call: what the CPU gave another size or other memory has it here.
  void settle() {
    for (auto& [impl, made] : cpu_of) {
      auto* own = impl->unsafe_storage().unsafeGetStorageImpl();
      const auto& theirs = made.storage();
      if (own->data() != theirs.data()) {
        own->set_data_ptr_noswap(renamed(theirs, kDevice));
        own->set_nbytes(theirs.nbytes());
      }
      impl->set_sizes_and_strides(made.sizes(), made.strides(), made.storage_offset());
    }
  }

  Tensor cuda(const Tensor& tensor) {
    if (!tensor.defined() || tensor.is_cuda()) return tensor;
    if (auto found = ours.find(tensor.unsafeGetTensorImpl()); found != ours.end()) return found->second;
    const auto& storage = tensor.storage();
    if (auto found = origins.find(storage.unsafeGetStorageImpl()); found != origins.end())
      return over(found->second, kKeys, tensor);
    return over(as(kDevice, &memory, storage), kKeys, tensor);
  }
};

// Operators whose indices CUDA takes from the CPU.
const std::unordered_set<std::string> kIndexing{
    "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put", "aten::_unsafe_index",
    "aten::_unsafe_index_put"};
// Operators for which CUDA refuses even one number on the CPU; others take it for a scalar.
const std::unordered_set<std::string> kNeverScalars{
    "aten::cat", "aten::index_select", "aten::gather", "aten::scatter", "aten::scatter_", "aten::scatter_add",
    "aten::scatter_add_", "aten::index_add", "aten::index_add_", "aten::index_copy_", "aten::embedding", "aten::mm",
    "aten::bmm", "aten::addmm", "aten::bincount", "aten::_foreach_copy_", "aten::searchsorted", "aten::equal",
    "aten::repeat_interleave"};

void refuse(const std::string& name, const Tensor& tensor) {
  TORCH_CHECK(
      false, name, ": Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (",
      tensor.sizes(), " ", tensor.dtype(), ")");
}

void boxed(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string name = schema.name();
  const auto count = schema.arguments().size();
  const auto begin = stack->size() - count;
  const bool indexing = kIndexing.count(name), strict = kNeverScalars.count(name);
  Seen seen;
  bool any = false;
  bool device_given = false, to_cpu = false;
  for (size_t i = 0; i < count; ++i) {
    const auto& value = (*stack)[begin + i];
    if (value.isTensor() && value.toTensor().defined()) any |= value.toTensor().is_cuda();
    if (value.isTensorList())
      for (const Tensor& one : value.toTensorVector()) any |= one.is_cuda();
    if (value.isDevice()) device_given = true, to_cpu = value.toDevice().is_cpu();
  }
  for (size_t i = 0; i < count; ++i) {
    auto& value = (*stack)[begin + i];
    const auto* alias = schema.arguments()[i].alias_info();
    const bool written = alias && alias->isWrite();
    auto look = [&](const Tensor& one, bool list) {
      if (!any || !one.defined() || one.is_cuda() || one.is_meta()) return;
      if (one.dim() || written || strict || list) refuse(name, one);
    };
    if (value.isTensor()) {
      look(value.toTensor(), false);
      value = IValue(seen.cpu(value.toTensor()));
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& one : value.toTensorVector()) {
        look(one, true);
        list.push_back(seen.cpu(one));
      }
      value = IValue(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (std::optional<Tensor> one : value.toOptionalTensorVector()) {
        if (one) {
          if (!indexing) look(*one, false);
          list.push_back(seen.cpu(*one));
        } else {
          list.push_back(std::nullopt);
        }
      }
      value = IValue(list);
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      value = IValue(Device(DeviceType::CPU));
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  seen.settle();
  if (device_given && to_cpu) return;
  const auto returned = schema.returns().size();
  const auto from = stack->size() - returned;
  for (size_t i = 0; i < returned; ++i) {
    auto& value = (*stack)[from + i];
    if (value.isTensor()) {
      value = IValue(seen.cuda(value.toTensor()));
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& one : value.toTensorVector()) list.push_back(seen.cuda(one));
      value = IValue(list);
    }
  }
}

Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &memory, kKeys, dtype.value_or(at::get_default_dtype_as_scalartype()), format);
}

Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory, kKeys,
      dtype.value_or(at::get_default_dtype_as_scalartype()));
}

Tensor as_strided(
    const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), self.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? offset->expect_int() : self.storage_offset());
  return made;
}

Tensor& copy_(Tensor& self, const Tensor& from, bool) {
  Seen seen;
  seen.cpu(self).copy_(seen.cpu(from));
  return self;
}

const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  at::native::resize_impl_cpu_(self.unsafeGetTensorImpl(), C10_AS_INTARRAYREF_SLOW(size), std::nullopt);
  return self;
}

Tensor& set_storage(
    Tensor& self, c10::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (stride.size() == size.size() && !stride.empty())
    impl->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  else {
    impl->set_sizes_contiguous(sizes);
    impl->set_storage_offset(offset.expect_int());
  }
  return self;
}

Tensor& set_whole_storage(Tensor& self, c10::Storage storage) {
  int64_t n = storage.nbytes() / self.dtype().itemsize();
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(0);
  impl->set_sizes_contiguous({n});
  return self;
}

Tensor& set_tensor(Tensor& self, const Tensor& from) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(from.storage());
  impl->set_sizes_and_strides(from.sizes(), from.strides(), from.storage_offset());
  return self;
}

void record_stream(Tensor&, c10::Stream) {}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&boxed>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("copy_", copy_);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("record_stream", record_stream);
}

Tensor on_host(const Tensor& tensor) {
  Seen seen;
  return seen.cpu(tensor);
}

void resize_storage(const Tensor& tensor, int64_t nbytes) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  auto data = memory.allocate(nbytes);
  if (nbytes && storage->data())
    std::memcpy(data.mutable_get(), storage->data(), std::min<size_t>(nbytes, storage->nbytes()));
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(nbytes);
}

int64_t memory_allocated() { return allocated; }

TORCH_LIBRARY(fake_cuda, m) {
  m.def("on_host(Tensor tensor) -> Tensor", on_host);
  m.def("resize_storage(Tensor tensor, int nbytes) -> ()", resize_storage);
  m.def("memory_allocated() -> int", memory_allocated);
}

}  // namespace
