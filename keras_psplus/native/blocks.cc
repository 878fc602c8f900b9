// Numbers in few bits each, with a scale for each block of them: encoding and decoding in one pass
// over memory, where TensorFlow's own kernels need several. They compute the same bits as these,
// but for means of magnitudes, which are summed up in another order.
//
// The loops are plain, and compilers vectorize them, for each kind of processor by itself.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "kernels.h"

namespace keras_psplus {
namespace {

KERAS_PSPLUS_INLINE float Number(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

// Puts a decoded element in its place, or adds it to what is there.
template <bool kAdd>
KERAS_PSPLUS_INLINE void Put(float x, float* to) {
  *to = kAdd ? *to + x : x;
}

// Formats encode one block of `size` elements: they write its codes, take from `total` what the
// codes say, and return the block's scale.

// Signed bytes, scaled by the largest magnitude.
struct Bytes {
  using Code = int8_t;
  static constexpr int64_t kElements = 1;

  static KERAS_PSPLUS_INLINE float Encode(float* __restrict total, int64_t size,
                                          int8_t* __restrict codes) {
    // Below this, a scale or its inverse would leave float32's normal range.
    constexpr float kTiny = 1.5e-36f;
    // Added to a small number it leaves no bits for fractions: sums are rounded to the nearest
    // whole number, half to even, and their last bits are that number.
    constexpr float kWhole = 3 << 22;
    uint32_t bits = 0;
    for (int64_t i = 0; i < size; ++i) bits = std::max(bits, MagnitudeBits(total[i]));
    if (bits >= kInfinity) {
      std::memset(codes, 0, size);
      return std::numeric_limits<float>::quiet_NaN();
    }
    const float largest = Number(bits), inverse = largest > kTiny ? 127.0f / largest : 0.0f;
    const float scale = largest * (1.0f / 127.0f);
    for (int64_t i = 0; i < size; ++i) {
      const float sum = total[i] * inverse + kWhole;
      codes[i] = static_cast<int8_t>(Bits(sum));
      total[i] -= (sum - kWhole) * scale;
    }
    return scale;
  }

  template <bool kAdd>
  static KERAS_PSPLUS_INLINE void Decode(const int8_t* __restrict codes, float scale, int64_t size,
                                         float* __restrict to) {
    for (int64_t i = 0; i < size; ++i) Put<kAdd>(codes[i] * scale, to + i);
  }
};

// Signs, scaled by the mean magnitude. Zeros are positive, as is what a last word is filled with.
struct Signs {
  using Code = int32_t;
  static constexpr int64_t kElements = 32;

  static KERAS_PSPLUS_INLINE float Encode(float* __restrict total, int64_t size,
                                          int32_t* __restrict words) {
    // Sums side by side: one sum would have to be added up element by element.
    float sums[kElements] = {};
    const int64_t whole = size / kElements * kElements;
    for (int64_t i = 0; i < whole; i += kElements) *words++ = Word(total + i, kElements, sums);
    if (whole < size) *words = Word(total + whole, size - whole, sums);
    for (int64_t half = kElements / 2; half; half /= 2) {
      for (int64_t i = 0; i < half; ++i) sums[i] += sums[half + i];
    }
    const float scale = sums[0] / size;
    for (int64_t i = 0; i < size; ++i) total[i] -= total[i] >= 0 ? scale : -scale;
    return scale;
  }

  template <bool kAdd>
  static KERAS_PSPLUS_INLINE void Decode(const int32_t* __restrict words, float scale,
                                         int64_t size, float* __restrict to) {
    const int64_t whole = size / kElements * kElements;
    for (int64_t i = 0; i < whole; i += kElements) {
      PutWord<kAdd>(*words++, scale, kElements, to + i);
    }
    if (whole < size) PutWord<kAdd>(*words, scale, size - whole, to + whole);
  }

 private:
  static KERAS_PSPLUS_INLINE uint32_t Word(const float* x, int64_t size, float* sums) {
    uint32_t word = ~0u;
    for (int64_t i = 0; i < size; ++i) {
      sums[i] += Number(MagnitudeBits(x[i]));
      word ^= static_cast<uint32_t>(!(x[i] >= 0)) << i;
    }
    return word;
  }

  template <bool kAdd>
  static KERAS_PSPLUS_INLINE void PutWord(uint32_t word, float scale, int64_t size, float* to) {
    for (int64_t i = 0; i < size; ++i) Put<kAdd>(Number(Bits(scale) ^ (~word >> i) << 31), to + i);
  }
};

// The same loop for each kind of processor.

template <typename Task>
void Run(const Task& task, int64_t first, int64_t last) {
  for (; first < last; ++first) task.Do(first);
}

#if defined(__x86_64__)
template <typename Task>
__attribute__((target("avx512f"))) void RunBy16(const Task& task, int64_t first, int64_t last) {
  for (; first < last; ++first) task.Do(first);
}

template <typename Task>
__attribute__((target("avx2"))) void RunBy8(const Task& task, int64_t first, int64_t last) {
  for (; first < last; ++first) task.Do(first);
}
#endif

// Does what there is to do for each block, on all of the device's threads.
template <typename Task>
void RunAll(OpKernelContext* context, const Task& task, int64_t blocks, int64_t cost) {
  auto* workers = context->device()->tensorflow_cpu_worker_threads()->workers;
  workers->ParallelFor(blocks, cost, [&](int64_t first, int64_t last) {
#if defined(__x86_64__)
    if (Has16()) return RunBy16(task, first, last);
    if (Has8()) return RunBy8(task, first, last);
#endif
    Run(task, first, last);
  });
}

// Where rows have their blocks. These are numbered through all rows.
template <class Format>
struct Layout {
  int64_t width, block, blocks = Parts(width, block), codes = Parts(width, Format::kElements);

  KERAS_PSPLUS_INLINE int64_t Row(int64_t i) const { return i / blocks; }
  KERAS_PSPLUS_INLINE int64_t First(int64_t i) const { return i % blocks * block; }
  KERAS_PSPLUS_INLINE int64_t Size(int64_t i) const { return std::min(block, width - First(i)); }
  KERAS_PSPLUS_INLINE int64_t Start(int64_t i) const { return Row(i) * width + First(i); }
  KERAS_PSPLUS_INLINE int64_t Code(int64_t i) const {
    return Row(i) * codes + First(i) / Format::kElements;
  }
};

template <class Format>
struct EncodeTask {
  Layout<Format> layout;
  const float *residual, *tensor;
  typename Format::Code* codes;
  float *scales, *left;

  KERAS_PSPLUS_INLINE void Do(int64_t i) const {
    const int64_t start = layout.Start(i), size = layout.Size(i);
    // The sum may be where the tensor is, but no element where another is.
#pragma GCC ivdep
    for (int64_t j = start; j < start + size; ++j) left[j] = residual[j] + tensor[j];
    scales[i] = Format::Encode(left + start, size, codes + layout.Code(i));
  }
};

template <class Format>
struct DecodeTask {
  Layout<Format> layout;
  // How many rows are added up.
  int64_t added;
  const typename Format::Code* codes;
  const float* scales;
  float* values;

  KERAS_PSPLUS_INLINE void Do(int64_t i) const {
    const int64_t size = layout.Size(i);
    const auto* code = codes + layout.Code(i);
    float* to = values + layout.Start(i);
    Format::template Decode<false>(code, scales[i], size, to);
    for (int64_t row = 1; row < added; ++row) {
      Format::template Decode<true>(code + row * layout.codes, scales[i + row * layout.blocks],
                                    size, to);
    }
  }
};

template <class Format>
class EncodeBlocks : public OpKernel {
 public:
  explicit EncodeBlocks(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("block", &block_));
    OP_REQUIRES(context, block_ % Format::kElements == 0,
                InvalidArgument("block must be a multiple of ", Format::kElements));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor &residual = context->input(0), &tensor = context->input(1);
    OP_REQUIRES(context, tensor.dims() == 2 && residual.shape() == tensor.shape(),
                InvalidArgument("residual and tensor must be matrices of one shape"));
    const int64_t rows = tensor.dim_size(0);
    const Layout<Format> layout = {tensor.dim_size(1), block_};
    Tensor *codes, *scales, *left;
    OP_REQUIRES_OK(context, context->allocate_output(0, {rows, layout.codes}, &codes));
    OP_REQUIRES_OK(context, context->allocate_output(1, {rows, layout.blocks}, &scales));
    OP_REQUIRES_OK(context,
                   context->forward_input_or_allocate_output({1}, 2, tensor.shape(), &left));
    const EncodeTask<Format> task = {layout,
                                     residual.flat<float>().data(),
                                     tensor.flat<float>().data(),
                                     codes->flat<typename Format::Code>().data(),
                                     scales->flat<float>().data(),
                                     left->flat<float>().data()};
    RunAll(context, task, rows * layout.blocks, std::min(block_, layout.width));
  }

 private:
  int64_t block_;
};

template <class Format>
class DecodeBlocks : public OpKernel {
 public:
  explicit DecodeBlocks(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("block", &block_));
    OP_REQUIRES_OK(context, context->GetAttr("width", &width_));
    OP_REQUIRES_OK(context, context->GetAttr("sum", &sum_));
    OP_REQUIRES(context, block_ % Format::kElements == 0,
                InvalidArgument("block must be a multiple of ", Format::kElements));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor &codes = context->input(0), &scales = context->input(1);
    const Layout<Format> layout = {width_, block_};
    OP_REQUIRES(context,
                codes.dims() == 2 && scales.dims() == 2 && codes.dim_size(0) > 0 &&
                    scales.dim_size(0) == codes.dim_size(0) &&
                    codes.dim_size(1) == layout.codes && scales.dim_size(1) == layout.blocks,
                InvalidArgument("codes and scales must be of rows of ", width_, " elements"));
    const int64_t rows = sum_ ? 1 : codes.dim_size(0), added = sum_ ? codes.dim_size(0) : 1;
    Tensor* values;
    OP_REQUIRES_OK(context, context->allocate_output(0, {rows, width_}, &values));
    const DecodeTask<Format> task = {layout, added,
                                     codes.flat<typename Format::Code>().data(),
                                     scales.flat<float>().data(), values->flat<float>().data()};
    RunAll(context, task, rows * layout.blocks, added * std::min(block_, width_));
  }

 private:
  int64_t block_, width_;
  bool sum_;
};

// Parts of a dimension, if it is known.
DimensionHandle PartsOf(InferenceContext* context, DimensionHandle size, int64_t of) {
  if (!InferenceContext::ValueKnown(size)) return context->UnknownDim();
  return context->MakeDim(Parts(InferenceContext::Value(size), of));
}

}  // namespace

REGISTER_OP("KerasPsplusEncodeBlocks")
    .Input("residual: float")
    .Input("tensor: float")
    .Attr("block: int >= 1")
    .Attr("code: {int8, int32}")
    .Output("codes: code")
    .Output("scales: float")
    .Output("left: float")
    .SetShapeFn([](InferenceContext* context) {
      int64_t block;
      tensorflow::DataType code;
      TF_RETURN_IF_ERROR(context->GetAttr("block", &block));
      TF_RETURN_IF_ERROR(context->GetAttr("code", &code));
      ShapeHandle shape;
      TF_RETURN_IF_ERROR(context->WithRank(context->input(1), 2, &shape));
      TF_RETURN_IF_ERROR(context->Merge(context->input(0), shape, &shape));
      const DimensionHandle rows = context->Dim(shape, 0), width = context->Dim(shape, 1);
      const int64_t elements = code == tensorflow::DT_INT8 ? Bytes::kElements : Signs::kElements;
      context->set_output(0, context->Matrix(rows, PartsOf(context, width, elements)));
      context->set_output(1, context->Matrix(rows, PartsOf(context, width, block)));
      context->set_output(2, shape);
      return absl::OkStatus();
    })
    .Doc(R"doc(
Encodes the sum of two matrices in few bits for each element, and says what that leaves out.

block: How many elements of a row have one scale.
codes: With int8, signed bytes; with int32, words of 32 signs, which are set for positive ones.
scales: Largest magnitude of each block by 127, or mean magnitude. A block with what is not finite
  has a scale that is not finite.
left: The sum, less what codes and scales say.
)doc");

REGISTER_OP("KerasPsplusDecodeBlocks")
    .Input("codes: code")
    .Input("scales: float")
    .Attr("block: int >= 1")
    .Attr("width: int >= 0")
    .Attr("sum: bool")
    .Attr("code: {int8, int32}")
    .Output("values: float")
    .SetShapeFn([](InferenceContext* context) {
      int64_t width;
      bool sum;
      ShapeHandle codes;
      TF_RETURN_IF_ERROR(context->GetAttr("width", &width));
      TF_RETURN_IF_ERROR(context->GetAttr("sum", &sum));
      TF_RETURN_IF_ERROR(context->WithRank(context->input(0), 2, &codes));
      const DimensionHandle rows = sum ? context->MakeDim(1) : context->Dim(codes, 0);
      context->set_output(0, context->Matrix(rows, context->MakeDim(width)));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Decodes rows of KerasPsplusEncodeBlocks.

width: Elements of a row.
sum: Whether rows are added up, in their order.
values: A row for each row, or one.
)doc");

#define KERAS_PSPLUS_REGISTER(operation, format)                            \
  REGISTER_KERNEL_BUILDER(Name("KerasPsplus" #operation)                    \
                              .Device(tensorflow::DEVICE_CPU)               \
                              .TypeConstraint<format::Code>("code"),        \
                          operation<format>)

KERAS_PSPLUS_REGISTER(EncodeBlocks, Bytes);
KERAS_PSPLUS_REGISTER(EncodeBlocks, Signs);
KERAS_PSPLUS_REGISTER(DecodeBlocks, Bytes);
KERAS_PSPLUS_REGISTER(DecodeBlocks, Signs);

}  // namespace keras_psplus
