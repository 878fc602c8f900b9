// What all kernels use.

#ifndef KERAS_PSPLUS_NATIVE_KERNELS_H_
#define KERAS_PSPLUS_NATIVE_KERNELS_H_

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

// For what is part of functions that are compiled for several kinds of processors.
#define KERAS_PSPLUS_INLINE inline __attribute__((always_inline))

namespace keras_psplus {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::errors::InvalidArgument;
using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

// The largest magnitude. Magnitudes compare as their bits do.
constexpr uint32_t kInfinity = 0x7f800000;

KERAS_PSPLUS_INLINE uint32_t Bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

// The bits of the magnitude of a number, above `kInfinity` if it is none.
KERAS_PSPLUS_INLINE uint32_t MagnitudeBits(float x) { return Bits(x) & 0x7fffffff; }

// How many blocks, words or whatever hold `size` elements. A sum could overflow.
inline int64_t Parts(int64_t size, int64_t of) { return size / of + (size % of != 0); }

#if defined(__x86_64__)
// Whether this processor has registers for so many numbers.
inline bool Has16() {
  static const bool has = __builtin_cpu_supports("avx512f");
  return has;
}

inline bool Has8() {
  static const bool has = __builtin_cpu_supports("avx2");
  return has;
}
#endif

}  // namespace keras_psplus

#endif  // KERAS_PSPLUS_NATIVE_KERNELS_H_
