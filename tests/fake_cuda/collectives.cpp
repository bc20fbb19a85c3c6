// NCCL's collectives between fake devices, carried by gloo. Each is done when the call returns, but for sends.

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

namespace {

using namespace c10d;
using at::Tensor;
using c10::intrusive_ptr;
using Works = std::vector<intrusive_ptr<Work>>;
using Tensors = std::vector<Tensor>;
using Lists = std::vector<Tensors>;
using Timeout = std::chrono::milliseconds;

Tensor host(const Tensor& tensor) {
  TORCH_CHECK(tensor.is_cuda(), "NCCL takes tensors on GPUs");
  static auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("fake_cuda::on_host", "").typed<Tensor(const Tensor&)>();
  return op.call(tensor);
}

// What is only moved and not added may be of any dtype.
Tensor moved(const Tensor& tensor) {
  Tensor same = host(tensor);
  return c10::isFloat8Type(same.scalar_type()) || same.scalar_type() == at::kBool ? same.view(at::kByte) : same;
}

struct AllOf final : Work {
  Works parts;
  Tensors results;
  explicit AllOf(Works given, Tensors made = {}) : parts(std::move(given)), results(std::move(made)) {}
  bool isCompleted() override {
    for (auto& part : parts)
      if (!part->isCompleted()) return false;
    return true;
  }
  bool isSuccess() const override { return true; }
  bool wait(Timeout timeout) override {
    for (auto& part : parts) part->wait(timeout);
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  Tensors result() override { return results; }
  intrusive_ptr<c10::ivalue::Future> getFuture() override {
    wait(kNoTimeout);
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(c10::IValue(results));
    return future;
  }
};

struct FakeNccl final : Backend {
  intrusive_ptr<Backend> gloo;
  bool coalescing = false;
  Works collected;

  explicit FakeNccl(intrusive_ptr<Backend> inner)
      : Backend(inner->getRank(), inner->getSize()), gloo(std::move(inner)) {}

  const std::string getBackendName() const override { return "nccl"; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { coalescing = true; }
  intrusive_ptr<Work> endCoalescing() override {
    coalescing = false;
    return c10::make_intrusive<AllOf>(std::exchange(collected, {}));
  }

  intrusive_ptr<Work> done(Tensors results = {}) {
    return c10::make_intrusive<AllOf>(Works{}, std::move(results));
  }
  intrusive_ptr<Work> begun(intrusive_ptr<Work> work) {
    if (coalescing) collected.push_back(work);
    return work;
  }

  void add(const Tensor& tensor, const ReduceOp& op) {
    AllreduceOptions opts;
    const bool mean = op == ReduceOp::AVG;
    opts.reduceOp = mean ? ReduceOp(ReduceOp::SUM) : op;
    Tensors one{tensor};
    gloo->allreduce(one, opts)->wait();
    if (mean) tensor.div_(getSize());
  }
  void spread(const Tensor& tensor, int64_t root) {
    BroadcastOptions opts;
    opts.rootRank = root;
    Tensors one{tensor};
    gloo->broadcast(one, opts)->wait();
  }
  void gather_all(const Tensors& outputs, const Tensor& input) {  // of any sizes
    for (int64_t rank = 0; rank < getSize(); ++rank) {
      if (rank == getRank()) outputs[rank].copy_(input);
      if (outputs[rank].numel()) spread(outputs[rank], rank);
    }
  }

  intrusive_ptr<Work> broadcast(Tensors& tensors, const BroadcastOptions& opts) override {
    for (auto& one : tensors) spread(moved(one), opts.rootRank);
    return done(tensors);
  }
  intrusive_ptr<Work> allreduce(Tensors& tensors, const AllreduceOptions& opts) override {
    for (auto& one : tensors) add(host(one), opts.reduceOp);
    return done(tensors);
  }
  intrusive_ptr<Work> allreduce_coalesced(Tensors& tensors, const AllreduceCoalescedOptions& opts) override {
    for (auto& one : tensors) add(host(one), opts.reduceOp);
    return done(tensors);
  }
  intrusive_ptr<Work> reduce(Tensors& tensors, const ReduceOptions& opts) override {
    for (auto& one : tensors) {
      Tensor sum = host(one).clone();
      add(sum, opts.reduceOp);
      if (getRank() == opts.rootRank) host(one).copy_(sum);
    }
    return done(tensors);
  }
  intrusive_ptr<Work> allgather(Lists& outputs, Tensors& inputs, const AllgatherOptions&) override {
    for (size_t i = 0; i < inputs.size(); ++i) {
      Tensors out;
      for (auto& one : outputs[i]) out.push_back(moved(one));
      gather_all(out, moved(inputs[i]));
    }
    return done(outputs[0]);
  }
  intrusive_ptr<Work> _allgather_base(Tensor& output, Tensor& input, const AllgatherOptions&) override {
    TORCH_CHECK(output.is_contiguous() && input.is_contiguous(), "NCCL takes contiguous tensors");
    gather_all(moved(output).view(-1).chunk(getSize()), moved(input).view(-1));
    return done({output});
  }
  intrusive_ptr<Work> allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const AllgatherOptions& opts) override {
    for (size_t i = 0; i < inputs.size(); ++i) _allgather_base(outputs[i], inputs[i], opts);
    return done(outputs);
  }
  intrusive_ptr<Work> reduce_scatter(Tensors& outputs, Lists& inputs, const ReduceScatterOptions& opts) override {
    for (size_t i = 0; i < outputs.size(); ++i)
      for (int64_t rank = 0; rank < getSize(); ++rank) {
        Tensor sum = host(inputs[i][rank]).clone();
        if (sum.numel()) add(sum, opts.reduceOp);
        if (rank == getRank()) host(outputs[i]).copy_(sum);
      }
    return done(outputs);
  }
  intrusive_ptr<Work> _reduce_scatter_base(Tensor& output, Tensor& input, const ReduceScatterOptions& opts) override {
    TORCH_CHECK(output.is_contiguous() && input.is_contiguous(), "NCCL takes contiguous tensors");
    Tensor sum = host(input).clone();
    add(sum, opts.reduceOp);
    host(output).view(-1).copy_(sum.view(-1).chunk(getSize())[getRank()]);
    return done({output});
  }
  intrusive_ptr<Work> reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const ReduceScatterOptions& opts) override {
    for (size_t i = 0; i < inputs.size(); ++i) _reduce_scatter_base(outputs[i], inputs[i], opts);
    return done(outputs);
  }
  intrusive_ptr<Work> alltoall_base(
      Tensor& output, Tensor& input, std::vector<int64_t>& to, std::vector<int64_t>& from,
      const AllToAllOptions& opts) override {
    TORCH_CHECK(output.is_contiguous() && input.is_contiguous(), "NCCL takes contiguous tensors");
    Tensor out = moved(output), in = moved(input);
    gloo->alltoall_base(out, in, to, from, opts)->wait();
    return done({output});
  }
  intrusive_ptr<Work> send(Tensors& tensors, int to, int tag) override {
    Tensors one{moved(tensors.at(0))};
    return begun(gloo->send(one, to, tag));
  }
  intrusive_ptr<Work> recv(Tensors& tensors, int from, int tag) override {
    Tensors one{moved(tensors.at(0))};
    return begun(gloo->recv(one, from, tag));
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  intrusive_ptr<Work> barrier(const BarrierOptions& opts) override {
    gloo->barrier(opts)->wait();
    return done();
  }
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  py::module_::import("torch._C._distributed_c10d");
  py::class_<FakeNccl, intrusive_ptr<FakeNccl>, c10d::Backend>(module, "FakeNccl")
      .def(py::init<intrusive_ptr<c10d::Backend>>());
}
