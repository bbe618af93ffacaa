// A CUDA device that is simulated on the host, for torch's CPU build. `__init__.py` says what it is for and what it
// leaves out. Device memory is host memory, and each operator runs the CPU's kernel on it:
//
// - Memory.    The allocator of CUDA tensors. It counts bytes, and refuses to exceed a limit as a full GPU does.
// - Pinned.    The allocator of pinned memory, so that `is_pinned` has the answer of a GPU.
// - Streams.   The current stream of each thread, and the copies that a stream has not executed yet.
// - Operators. The fallback of all CUDA operators, and the few that need a kernel of their own.
// - Registry.  What torch asks a backend for: hooks and device guard.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

namespace {

using torch::jit::Stack;
const c10::Device HOST(c10::DeviceType::CPU);
const c10::DeviceIndex N_DEVICES = 4;
std::atomic<c10::DeviceIndex> current_index = 0;  // a process uses one device: the last that it selected
c10::Device current_device() { return c10::Device(c10::DeviceType::CUDA, current_index); }

// ---- Memory ---------------------------------------------------------------------------------------------------------

struct Usage {
  std::mutex lock;
  size_t allocated = 0, peak = 0, limit = SIZE_MAX;
} usage;

struct Block {
  c10::DataPtr memory;
  size_t n_bytes;
};

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  {
    std::lock_guard<std::mutex> guard(usage.lock);
    usage.allocated -= block->n_bytes;
  }
  delete block;
}

// Device memory that is `memory` of the host.
c10::DataPtr on_device(c10::DataPtr memory, size_t n_bytes) {
  {
    std::lock_guard<std::mutex> guard(usage.lock);
    TORCH_CHECK_WITH(OutOfMemoryError, usage.allocated + n_bytes <= usage.limit,
        "CUDA out of memory. Tried to allocate ", n_bytes, " bytes; ", usage.allocated, " of ", usage.limit,
        " are used");
    usage.allocated += n_bytes;
    usage.peak = std::max(usage.peak, usage.allocated);
  }
  void* address = memory.get();
  return {address, new Block{std::move(memory), n_bytes}, &free_block, current_device()};
}

// The host's lack of memory is the device's.
template <class Function>
auto with_host_memory(Function&& function) {
  try {
    return function();
  } catch (const c10::Error& error) {
    if (!std::strstr(error.what(), "DefaultCPUAllocator: can't allocate memory")) throw;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. ", error.what_without_backtrace());
  }
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n_bytes) override {
    return with_host_memory([&] { return on_device(c10::GetCPUAllocator()->allocate(n_bytes), n_bytes); });
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t n_bytes) const override { std::memcpy(to, from, n_bytes); }
} device_allocator;

// ---- Shared ---------------------------------------------------------------------------------------------------------

struct Mapping {
  void* address;
  size_t n_bytes;
  int file;
};

c10::DataPtr map_file(int file, size_t n_bytes) {
  void* address = mmap(nullptr, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  TORCH_CHECK(address != MAP_FAILED, "mmap: ", std::strerror(errno));
  return {address, new Mapping{address, n_bytes, file},
          [](void* context) {
            auto* mapping = static_cast<Mapping*>(context);
            munmap(mapping->address, mapping->n_bytes);
            close(mapping->file);
            delete mapping;
          },
          HOST};
}

// ---- Pinned ---------------------------------------------------------------------------------------------------------

struct Pinned {
  std::mutex lock;
  std::map<const char*, size_t> blocks;
} pinned;

void free_pinned(void* context) {
  auto* memory = static_cast<c10::DataPtr*>(context);
  {
    std::lock_guard<std::mutex> guard(pinned.lock);
    pinned.blocks.erase(static_cast<const char*>(memory->get()));
  }
  delete memory;
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n_bytes) override {
    auto* memory = new c10::DataPtr(c10::GetCPUAllocator()->allocate(n_bytes));
    std::lock_guard<std::mutex> guard(pinned.lock);
    if (n_bytes) pinned.blocks[static_cast<const char*>(memory->get())] = n_bytes;
    return {memory->get(), memory, &free_pinned, HOST};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t n_bytes) const override { std::memcpy(to, from, n_bytes); }
} pinned_allocator;

// cudaHostRegister and cudaHostUnregister
void pin(const char* start, size_t n_bytes) {
  std::lock_guard<std::mutex> guard(pinned.lock);
  if (n_bytes) pinned.blocks[start] = n_bytes;
  else pinned.blocks.erase(start);
}

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> guard(pinned.lock);
  auto next = pinned.blocks.upper_bound(static_cast<const char*>(data));
  if (next == pinned.blocks.begin()) return false;
  auto& [start, n_bytes] = *std::prev(next);
  return static_cast<const char*>(data) < start + n_bytes;
}

// ---- Streams --------------------------------------------------------------------------------------------------------

// Kernels run at once. Copies that need not have been executed when the call returns are executed late.
struct Copy {
  at::Tensor to, from;  // both on the host
};
struct Queues {
  std::recursive_mutex lock;
  std::map<c10::StreamId, std::vector<Copy>> to_host, to_device;
} queues;
thread_local c10::StreamId current_stream = 0;
std::atomic<c10::StreamId> next_stream = 1;

void execute(std::map<c10::StreamId, std::vector<Copy>>& queue, c10::StreamId stream) {
  std::lock_guard<std::recursive_mutex> guard(queues.lock);
  auto copies = std::move(queue[stream]);
  queue[stream].clear();
  c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
  for (auto& copy : copies) copy.to.copy_(copy.from);
}

std::atomic<bool> refuses_waits = false;

// What a host does when it needs a value of the device.
void wait_in_operator(const char* name) {
  TORCH_CHECK(!refuses_waits, "called a synchronizing CUDA operation: ", name);
}

void wait_for_stream(c10::StreamId stream) {
  execute(queues.to_device, stream);
  execute(queues.to_host, stream);
}

// ---- Operators ------------------------------------------------------------------------------------------------------

// A host tensor with the memory of a device tensor. It keeps the memory alive.
at::Tensor on_host(const at::Tensor& tensor) {
  auto storage = tensor.storage();
  auto* owner = new c10::Storage(storage);
  c10::DataPtr memory(storage.mutable_data(), owner, [](void* o) { delete static_cast<c10::Storage*>(o); }, HOST);
  auto impl = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), storage.nbytes(), std::move(memory), c10::GetCPUAllocator(), true);
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(std::move(impl)), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return result;
}

c10::Storage device_storage(const c10::Storage& host) {
  size_t n_bytes = host.nbytes();
  auto* owner = new c10::Storage(host);
  c10::DataPtr memory(host.mutable_data(), owner, [](void* o) { delete static_cast<c10::Storage*>(o); }, HOST);
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), n_bytes, on_device(std::move(memory), n_bytes), &device_allocator, true));
}

// Give a device tensor the memory and the shape of `host`, which was resized.
void become(const at::Tensor& device, const at::Tensor& host) {
  if (host.storage().data() != device.storage().data()) {
    auto moved = device_storage(host.storage());
    auto* impl = device.storage().unsafeGetStorageImpl();
    impl->set_nbytes(moved.nbytes());
    impl->set_data_ptr_noswap(std::move(moved.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks()));
  }
  if (host.sizes() != device.sizes() || host.strides() != device.strides()) {
    device.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  }
}

// Replace each tensor in an argument or a result.
template <class Function>
void map_tensors(c10::IValue& value, Function&& function) {
  if (value.isTensor()) {
    value = function(value.toTensor());
  } else if (value.isTensorList()) {
    std::vector<at::Tensor> tensors;
    for (const at::Tensor& tensor : value.toTensorVector()) tensors.push_back(function(tensor));
    value = std::move(tensors);
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> tensors;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
      tensors.push_back(tensor ? std::optional(function(*tensor)) : std::nullopt);
    }
    value = std::move(tensors);
  } else if (value.isList() && value.toListRef().size() && value.toListRef()[0].isTensorList()) {  // c10d::allgather_
    std::vector<std::vector<at::Tensor>> lists;
    for (const auto& list : value.toListRef()) {
      lists.emplace_back();
      for (const at::Tensor& tensor : list.toTensorVector()) lists.back().push_back(function(tensor));
    }
    value = std::move(lists);
  }
}

// The device tensors of one call, and the host tensors that the CPU's kernel gets for them.
class Arguments {
 public:
  explicit Arguments(const c10::OperatorHandle& op) : name_(toString(op.operator_name())) {}

  at::Tensor lower(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      TORCH_CHECK(tensor.dim() == 0 || takes_host_tensors(), "Expected all tensors to be on the same device, but found "
          "at least two devices, cuda:0 and ", tensor.device(), "! (when running ", name_, ")");
      return tensor;
    }
    for (auto& [device, host] : pairs_) {
      if (device.is_same(tensor)) return host;
    }
    pairs_.emplace_back(tensor, on_host(tensor));
    return pairs_.back().second;
  }

  // The result of the kernel as a device tensor: an argument, a view of one, or a new tensor.
  at::Tensor raise(const at::Tensor& result) {
    if (!result.defined() || result.is_cuda()) return result;
    for (auto& [device, host] : pairs_) {
      if (host.is_same(result)) return device;
    }
    for (auto& [device, host] : pairs_) {
      if (host.storage().is_alias_of(result.storage())) return wrap(result, device.storage());
    }
    return wrap(result, device_storage(result.storage()));
  }

  // Kernels resize the tensors of `out=`.
  void resize() {
    for (auto& [device, host] : pairs_) become(device, host);
  }

  // True if the host needs values of the device to allocate the result.
  bool has_size_from_values(const Stack& stack) const {
    static const std::set<std::string> NAMES{"aten::nonzero", "aten::masked_select", "aten::bincount", "aten::equal",
        "aten::repeat_interleave.Tensor", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive"};
    if (NAMES.count(name_)) return true;
    const bool writes = !name_.rfind("aten::index_put", 0) || !name_.rfind("aten::_index_put", 0);
    if (name_ != "aten::index.Tensor" && !writes) return false;
    if (writes) {  // a number of the host becomes `masked_fill`
      for (const auto& value : stack) {
        if (value.isTensor() && value.toTensor().is_cpu() && value.toTensor().numel() == 1) return false;
      }
    }
    for (const auto& value : stack) {
      if (!value.isOptionalTensorList()) continue;
      for (const std::optional<at::Tensor>& index : value.toOptionalTensorList()) {
        if (index && index->defined() && (index->dtype() == at::kBool || index->dtype() == at::kByte)) return true;
      }
    }
    return false;
  }

 private:
  static at::Tensor wrap(const at::Tensor& host, c10::Storage storage) {
    auto result = at::detail::make_tensor<c10::TensorImpl>(
        std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA), host.dtype());
    result.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
    if (host.unsafeGetTensorImpl()->is_wrapped_number()) result.unsafeGetTensorImpl()->set_wrapped_number(true);
    return result;
  }

  // CUDA's kernels of these operators accept indices on the host.
  bool takes_host_tensors() const { return name_.rfind("aten::index", 0) == 0 || name_.rfind("aten::_index", 0) == 0; }

  std::string name_;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs_;
};

void run_on_host(const c10::OperatorHandle& op, Stack* stack) {
  execute(queues.to_device, current_stream);
  TORCH_CHECK_NOT_IMPLEMENTED(op.hasKernelForDispatchKey(c10::DispatchKey::CPU),
      "the simulated GPU has no kernel of ", op.operator_name());
  Arguments arguments(op);
  if (refuses_waits && arguments.has_size_from_values(*stack)) wait_in_operator(toString(op.operator_name()).c_str());
  for (auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    auto& each = const_cast<c10::IValue&>(value);
    if (each.isDevice() && each.toDevice().is_cuda()) each = HOST;
    map_tensors(each, [&](const at::Tensor& tensor) { return arguments.lower(tensor); });
  }
  with_host_memory([&] { op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack); });
  arguments.resize();
  for (auto& value : torch::jit::last(*stack, op.schema().returns().size())) {
    map_tensors(const_cast<c10::IValue&>(value), [&](const at::Tensor& tensor) { return arguments.raise(tensor); });
  }
}

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(sizes, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA),
      dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype())), format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(sizes, strides, &device_allocator,
      c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype())));
}

// The memory of a host tensor may change, or be read, until its stream is waited for, if the copy does not block:
// the host's values of a copy to the host are wrong until then, and a copy from pinned memory reads it late.
at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  execute(queues.to_device, current_stream);
  auto to = self.is_cuda() ? on_host(self) : self, from = source.is_cuda() ? on_host(source) : source;
  if (non_blocking && source.is_cuda() && !self.is_cuda()) {
    auto snapshot = from.clone();
    to.zero_();
    std::lock_guard<std::recursive_mutex> guard(queues.lock);
    queues.to_host[current_stream].push_back({to, snapshot});
  } else if (non_blocking && self.is_cuda() && !source.is_cuda() && is_pinned(source.const_data_ptr())) {
    std::lock_guard<std::recursive_mutex> guard(queues.lock);
    queues.to_device[current_stream].push_back({to, from});
  } else {
    if (self.is_cuda() != source.is_cuda()) {
      wait_in_operator("a copy between host and device that blocks, or whose memory on the host is not pinned");
      wait_for_stream(current_stream);
    }
    to.copy_(from);
  }
  return self;
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  wait_in_operator("item");
  wait_for_stream(current_stream);
  return at::_local_scalar_dense(on_host(self));
}

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  auto host = on_host(self);
  host.resize__symint(sizes, format);
  become(self, host);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef sizes,
                        at::IntArrayRef strides) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  int64_t n_items = source.nbytes() / self.itemsize();
  return set_storage(self, std::move(source), 0, {n_items}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_(at::Tensor& self) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, &device_allocator, true);
  return self.set_(storage, 0, {0}, {});
}

void record_stream(at::Tensor&, at::Stream) {}

// Storages of CUDA cannot be resized in a CPU build, except through a tensor.
void resize_storage(const at::Tensor& tensor, int64_t n_bytes) {
  auto* impl = tensor.storage().unsafeGetStorageImpl();
  auto memory = device_allocator.allocate(n_bytes);
  std::memcpy(memory.get(), impl->data(), std::min(impl->nbytes(), static_cast<size_t>(n_bytes)));
  impl->set_nbytes(n_bytes);
  impl->set_data_ptr_noswap(std::move(memory));
}

// Move the memory of a tensor's storage to a file that other processes can map, and return the path of the file.
std::string share_storage(const at::Tensor& tensor) {
  auto* impl = tensor.storage().unsafeGetStorageImpl();
  const size_t n_bytes = impl->nbytes();
  int file = memfd_create("simulated GPU", MFD_CLOEXEC);
  TORCH_CHECK(file >= 0 && ftruncate(file, n_bytes) == 0, "memfd: ", std::strerror(errno));
  auto memory = map_file(file, n_bytes);
  std::memcpy(memory.get(), impl->data(), n_bytes);
  impl->set_data_ptr_noswap(on_device(std::move(memory), n_bytes));
  return "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(file);
}

at::Tensor open_shared(std::string path, int64_t n_bytes) {
  int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  TORCH_CHECK(file >= 0, "open ", path, ": ", std::strerror(errno));
  c10::Storage storage(c10::Storage::use_byte_size_t(), n_bytes, on_device(map_file(file, n_bytes), 0),
                       &device_allocator, true);
  return at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                                  caffe2::TypeMeta::Make<uint8_t>());
}

// Kernels of `kernels.py` read memory by its address. They begin with this call.
void launch() { execute(queues.to_device, current_stream); }

// The fused kernels of a GPU are not simulated.
int64_t fused_sdp_choice(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                         double, bool, std::optional<double>, bool) {
  return 0;  // at::SDPBackend::math
}

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }

// Gloo runs the collectives of NCCL. Their operators have kernels for CUDA in a CPU build, which gloo would reject.
const torch::Library& replace_collectives() {
  struct Silent : c10::WarningHandler {
    void process(const c10::Warning&) override {}  // that kernels are replaced
  } silent;
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  static torch::Library library(torch::Library::IMPL, "c10d", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  for (const char* name : {"allgather_", "allgather_coalesced_", "allgather_into_tensor_coalesced_", "_allgather_base_",
           "allreduce_", "allreduce_coalesced_", "alltoall_", "alltoall_base_", "broadcast_", "gather_", "recv_",
           "recv_any_source_", "reduce_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_",
           "_reduce_scatter_base_", "scatter_", "send"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  }
  return library;
}
const torch::Library& collectives = replace_collectives();

TORCH_LIBRARY(simulated_gpu, library) {
  library.def("resize_storage(Tensor tensor, int n_bytes) -> ()", &resize_storage);
  library.def("share_storage(Tensor tensor) -> str", &share_storage);
  library.def("open_shared(str path, int n_bytes) -> Tensor", &open_shared);
  library.def("launch() -> ()", &launch);
  library.def("on_host(Tensor tensor) -> Tensor", &on_host);
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("unfold", &at::native::unfold);
  library.impl("copy_", &copy_);
  library.impl("_local_scalar_dense", &local_scalar_dense);
  library.impl("resize_", &resize_);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("set_", &set_);
  library.impl("record_stream", &record_stream);
  library.impl("_fused_sdp_choice", &fused_sdp_choice);
}

// ---- Registry -------------------------------------------------------------------------------------------------------

struct DeviceGuard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  static c10::Stream stream(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, current_device(), id); }
  c10::Device exchangeDevice(c10::Device) const override { return current_device(); }
  c10::Device getDevice() const override { return current_device(); }
  c10::DeviceIndex deviceCount() const noexcept override { return N_DEVICES; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(next_stream++); }
  c10::Stream exchangeStream(c10::Stream next) const noexcept override {
    return stream(std::exchange(current_stream, next.id()));
  }
  // An event is the number of its stream: to wait for it is to wait for all copies of the stream.
  void record(void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new c10::StreamId;
    *static_cast<c10::StreamId*>(*event) = s.id();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<c10::StreamId*>(event);
  }
  void synchronizeEvent(void* event) const override { wait_for_stream(*static_cast<c10::StreamId*>(event)); }
  void synchronizeStream(const c10::Stream& stream) const override { wait_for_stream(stream.id()); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
} device_guard;
const c10::impl::DeviceGuardImplRegistrar registered(c10::DeviceType::CUDA, &device_guard);
const bool has_allocator = (c10::SetAllocator(c10::DeviceType::CUDA, &device_allocator), true);

}  // namespace

namespace simulated {
struct CUDAHooks : at::CUDAHooksInterface {  // torch looks for this name
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return N_DEVICES; }
  int getNumGPUs() const override { return N_DEVICES; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return current_index; }
  c10::DeviceIndex current_device() const override { return current_index; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return current_index; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return current_index; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  // A generator of the host, which the CPU's kernels expect.
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  at::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
};
}  // namespace simulated
namespace at {
using simulated::CUDAHooks;
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at

// ---- Functions for Python -------------------------------------------------------------------------------------------

extern "C" {
void gpu_set_device(int index) { current_index = index; }
int gpu_n_devices() { return N_DEVICES; }
void gpu_wait_for_device() {
  std::set<c10::StreamId> streams;
  for (auto* queue : {&queues.to_host, &queues.to_device}) {
    for (auto& [stream, copies] : *queue) streams.insert(stream);
  }
  for (auto stream : streams) wait_for_stream(stream);
}
void gpu_refuse_waits(int refuses) { refuses_waits = refuses; }
void gpu_pin(void* start, size_t n_bytes) { pin(static_cast<char*>(start), n_bytes); }
int gpu_is_pinned(void* address) { return is_pinned(address); }
size_t gpu_allocated() { return usage.allocated; }
size_t gpu_peak() { return usage.peak; }
void gpu_reset_peak() { usage.peak = usage.allocated; }
void gpu_set_limit(size_t n_bytes) { usage.limit = n_bytes; }
}
