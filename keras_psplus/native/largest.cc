// The largest elements of a sum, and sums of such elements, in one pass over memory each, where
// TensorFlow's own kernels need about ten. They compute the same bits as these.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels.h"

namespace keras_psplus {
namespace {

// Of as many elements the place in two bytes is told; how many places come before, in four.
constexpr int64_t kStretch = 1 << 16;
// What one thread does at a time.
constexpr int64_t kPart = 4 * kStretch;
// So many magnitudes tell where about the threshold is; a few that lie side by side, as they come
// into the processor together.
constexpr int64_t kSample = 1 << 14, kSideBySide = 4;
// Deviations of how many of them are large: such neighbours are alike, so more than of any others.
constexpr double kDeviations = 5;

// What is large, and where it is.
struct Element {
  int32_t place;
  float value;
};

int64_t Stretches(int64_t size) { return std::max<int64_t>(1, Parts(size, kStretch)); }

// All that is not finite is the largest, and alike.
uint32_t Magnitude(float x) { return std::min(MagnitudeBits(x), kInfinity); }

void AddFrom(int64_t i, int64_t end, const float* a, const float* b, uint32_t threshold,
             float* sum, std::vector<Element>* found) {
  for (; i < end; ++i) {
    sum[i] = a[i] + b[i];
    if (Magnitude(sum[i]) >= threshold) found->push_back({static_cast<int32_t>(i), sum[i]});
  }
}

#if defined(__x86_64__)
__attribute__((target("avx512f"))) int64_t AddBy16(int64_t i, int64_t end, const float* a,
                                                   const float* b, uint32_t threshold, float* sum,
                                                   std::vector<Element>* found) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff), least = _mm512_set1_epi32(threshold);
  for (; i + 16 <= end; i += 16) {
    const __m512 added = _mm512_add_ps(_mm512_loadu_ps(a + i), _mm512_loadu_ps(b + i));
    _mm512_storeu_ps(sum + i, added);
    unsigned large = _mm512_cmpge_epu32_mask(
        _mm512_and_si512(_mm512_castps_si512(added), magnitude), least);
    for (; large; large &= large - 1) {
      const int32_t place = i + __builtin_ctz(large);
      found->push_back({place, sum[place]});
    }
  }
  return i;
}

__attribute__((target("avx2"))) int64_t AddBy8(int64_t i, int64_t end, const float* a,
                                               const float* b, uint32_t threshold, float* sum,
                                               std::vector<Element>* found) {
  // Without their sign, the bits compare as signed integers do.
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  const __m256i below = _mm256_set1_epi32(static_cast<int32_t>(threshold) - 1);
  for (; i + 8 <= end; i += 8) {
    const __m256 added = _mm256_add_ps(_mm256_loadu_ps(a + i), _mm256_loadu_ps(b + i));
    _mm256_storeu_ps(sum + i, added);
    unsigned large = _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(
        _mm256_and_si256(_mm256_castps_si256(added), magnitude), below)));
    for (; large; large &= large - 1) {
      const int32_t place = i + __builtin_ctz(large);
      found->push_back({place, sum[place]});
    }
  }
  return i;
}
#endif

// Adds two vectors, from `i` to `end`, and appends the places of what is large.
void AddAndFind(int64_t i, int64_t end, const float* a, const float* b, uint32_t threshold,
                float* sum, std::vector<Element>* found) {
#if defined(__x86_64__)
  if (Has16()) {
    i = AddBy16(i, end, a, b, threshold, sum, found);
  } else if (Has8()) {
    i = AddBy8(i, end, a, b, threshold, sum, found);
  }
#endif
  AddFrom(i, end, a, b, threshold, sum, found);
}

// The `rank`-th largest of some magnitudes, from 1 up. Their upper bits leave few to be compared.
uint32_t Largest(const std::vector<uint32_t>& magnitudes, int64_t rank) {
  constexpr int kLower = 19;
  std::vector<int64_t> counts(1 << (31 - kLower));
  for (const uint32_t magnitude : magnitudes) ++counts[magnitude >> kLower];
  uint32_t upper = counts.size() - 1;
  while (rank > counts[upper]) rank -= counts[upper--];
  std::vector<uint32_t> alike;
  alike.reserve(counts[upper]);
  for (const uint32_t magnitude : magnitudes) {
    if (magnitude >> kLower == upper) alike.push_back(magnitude);
  }
  const auto at = alike.begin() + rank - 1;
  std::nth_element(alike.begin(), at, alike.end(), std::greater<uint32_t>());
  return *at;
}

REGISTER_OP("KerasPsplusTakeLargest")
    .Input("residual: float")
    .Input("tensor: float")
    .Attr("count: int >= 1")
    .Output("values: float")
    .Output("low: uint16")
    .Output("starts: int32")
    .Output("left: float")
    .SetShapeFn([](InferenceContext* context) {
      int64_t count;
      TF_RETURN_IF_ERROR(context->GetAttr("count", &count));
      context->set_output(0, context->Matrix(1, count));
      context->set_output(1, context->Matrix(1, count));
      const auto size = context->NumElements(context->input(1));
      const bool known = InferenceContext::ValueKnown(size);
      const int64_t further = known ? Stretches(InferenceContext::Value(size)) - 1 : -1;
      context->set_output(2, context->Matrix(1, further));
      context->set_output(3, context->input(1));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Takes the largest elements out of the sum of two tensors.

values: The `count` elements of largest magnitude, in the order of their places.
low: Of their places, what two bytes can hold.
starts: How many places come before each stretch of 65,536 elements but the first.
left: The sum, with zeros where elements were taken.
)doc");

class TakeLargest : public OpKernel {
 public:
  explicit TakeLargest(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("count", &count_));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor &residual = context->input(0), &tensor = context->input(1);
    const int64_t size = tensor.NumElements();
    OP_REQUIRES(context, residual.NumElements() == size && count_ <= size && size <= INT32_MAX,
                InvalidArgument("residual and tensor must be of one size, from count to 2^31 - 1"));
    const float* a = residual.flat<float>().data();
    const float* b = tensor.flat<float>().data();
    // Chosen before a sum is written, which may be where the tensor is.
    const std::vector<uint32_t> sample = Sample(a, b, size);
    int64_t rank = Rank(sample.size(), size);
    uint32_t threshold = rank ? Largest(sample, rank) : 0;

    Tensor *values, *low, *starts, *left;
    const TensorShape row({1, count_});
    OP_REQUIRES_OK(context, context->allocate_output(0, row, &values));
    OP_REQUIRES_OK(context, context->allocate_output(1, row, &low));
    OP_REQUIRES_OK(context, context->allocate_output(2, {1, Stretches(size) - 1}, &starts));
    OP_REQUIRES_OK(context,
                   context->forward_input_or_allocate_output({1}, 3, tensor.shape(), &left));
    float* sum = left->flat<float>().data();
    std::vector<Element> found = Find(context, a, b, size, Above(threshold), sum);
    while (!Fill(sum, size, threshold, &found)) {
      // A sample can mislead, as with units that are mostly silent.
      rank *= 4;
      threshold = rank < static_cast<int64_t>(sample.size()) ? Largest(sample, rank) : 0;
      found.clear();
      for (int64_t i = 0; i < size; ++i) {
        if (Magnitude(sum[i]) >= Above(threshold)) {
          found.push_back({static_cast<int32_t>(i), sum[i]});
        }
      }
    }
    Write(found, sum, values->flat<float>().data(), low->flat<tensorflow::uint16>().data(),
          starts->flat<int32_t>().data(), starts->NumElements());
  }

 private:
  static std::vector<uint32_t> Sample(const float* a, const float* b, int64_t size) {
    std::vector<uint32_t> sample;
    if (size < 4 * kSample) return sample;
    // Odd, so as not to fall in with the columns of a matrix.
    const int64_t stride = (size / kSample * kSideBySide) | 1;
    sample.reserve((size / stride + 1) * kSideBySide);
    for (int64_t first = 0; first + kSideBySide <= size; first += stride) {
      for (int64_t i = first; i < first + kSideBySide; ++i) {
        sample.push_back(Magnitude(a[i] + b[i]));
      }
    }
    return sample;
  }

  // Which of the sample is small enough for few more than `count_` to be as large; 0 for none.
  int64_t Rank(int64_t sampled, int64_t size) const {
    if (!sampled) return 0;
    const double expected = static_cast<double>(count_) * sampled / size;
    return std::min<int64_t>(sampled, std::ceil(expected + kDeviations * std::sqrt(expected)));
  }

  // Of what is as large as the threshold there may be very much, as with zeros. So what is larger
  // is looked for first. Nothing is larger than what is not finite.
  static uint32_t Above(uint32_t threshold) { return std::min(threshold + 1, kInfinity); }

  // Adds the first elements that are as large as the threshold, until there are `count_`. Returns
  // whether there are.
  bool Fill(const float* sum, int64_t size, uint32_t threshold, std::vector<Element>* found) const {
    const size_t larger = found->size(), wanted = count_;
    if (larger >= wanted) return true;
    if (threshold == kInfinity) return false;
    found->reserve(wanted);
    for (int64_t i = 0; i < size && found->size() < wanted; ++i) {
      if (Magnitude(sum[i]) == threshold) found->push_back({static_cast<int32_t>(i), sum[i]});
    }
    if (found->size() < wanted) return false;
    std::inplace_merge(found->begin(), found->begin() + larger, found->end(),
                       [](const Element& a, const Element& b) { return a.place < b.place; });
    return true;
  }

  static std::vector<Element> Find(OpKernelContext* context, const float* a, const float* b,
                                   int64_t size, uint32_t threshold, float* sum) {
    const int64_t parts = Parts(size, kPart);
    std::vector<std::vector<Element>> of_parts(parts);
    auto* workers = context->device()->tensorflow_cpu_worker_threads()->workers;
    workers->ParallelFor(parts, kPart, [&](int64_t first, int64_t last) {
      for (int64_t part = first; part < last; ++part) {
        const int64_t begin = part * kPart, end = std::min(size, begin + kPart);
        AddAndFind(begin, end, a, b, threshold, sum, &of_parts[part]);
      }
    });
    std::vector<Element> found;
    for (const auto& of_part : of_parts) found.insert(found.end(), of_part.begin(), of_part.end());
    return found;
  }

  // Takes exactly `count_` of what was found: of those like the last, the first.
  void Write(const std::vector<Element>& found, float* sum, float* values, uint16_t* low,
             int32_t* starts, int64_t further) const {
    std::vector<uint32_t> magnitudes(found.size());
    std::transform(found.begin(), found.end(), magnitudes.begin(),
                   [](const Element& element) { return Magnitude(element.value); });
    const uint32_t last = Largest(magnitudes, count_);
    int64_t equal = count_;
    for (const uint32_t magnitude : magnitudes) equal -= magnitude > last;
    int64_t taken = 0, stretch = 0;
    for (size_t i = 0; i < found.size(); ++i) {
      if (magnitudes[i] < last || (magnitudes[i] == last && equal-- <= 0)) continue;
      const auto [place, value] = found[i];
      while (stretch < place / kStretch) starts[stretch++] = taken;
      values[taken] = value;
      low[taken++] = place % kStretch;
      sum[place] = 0;
    }
    while (stretch < further) starts[stretch++] = taken;
  }

  int64_t count_;
};

REGISTER_KERNEL_BUILDER(Name("KerasPsplusTakeLargest").Device(tensorflow::DEVICE_CPU), TakeLargest);

REGISTER_OP("KerasPsplusAddUp")
    .Input("values: float")
    .Input("low: uint16")
    .Input("starts: int32")
    .Attr("size: int >= 1")
    .Output("total: float")
    .SetShapeFn([](InferenceContext* context) {
      int64_t size;
      TF_RETURN_IF_ERROR(context->GetAttr("size", &size));
      context->set_output(0, context->Vector(size));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Adds up rows of which few elements are given, in the order of the rows.

values: Of each row, the elements that are not zero.
low: Their places, as of KerasPsplusTakeLargest.
starts: As of KerasPsplusTakeLargest.
total: Vector of `size` elements.
)doc");

class AddUp : public OpKernel {
 public:
  explicit AddUp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("size", &size_));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor &values = context->input(0), &low = context->input(1), &starts = context->input(2);
    const int64_t stretches = Stretches(size_);
    OP_REQUIRES(context,
                values.dims() == 2 && low.shape() == values.shape() && starts.dims() == 2 &&
                    starts.dim_size(0) == values.dim_size(0) && starts.dim_size(1) == stretches - 1,
                InvalidArgument("values, low and starts must have a row for each other"));
    const int64_t rows = values.dim_size(0), count = values.dim_size(1);
    const float* value = values.flat<float>().data();
    const uint16_t* place = low.flat<tensorflow::uint16>().data();
    const int32_t* start = starts.flat<int32_t>().data();
    // Places may come from another machine.
    for (int64_t row = 0; row < rows; ++row) {
      const int32_t* of_row = start + row * (stretches - 1);
      bool good = std::is_sorted(of_row, of_row + stretches - 1);
      good = good && (stretches == 1 || (of_row[0] >= 0 && of_row[stretches - 2] <= count));
      const int64_t last = stretches == 1 ? 0 : good ? of_row[stretches - 2] : count;
      const int64_t length = size_ - (stretches - 1) * kStretch;
      for (int64_t i = last; i < count; ++i) good = good && place[row * count + i] < length;
      OP_REQUIRES(context, good, InvalidArgument("places must be below ", size_));
    }
    Tensor* total;
    OP_REQUIRES_OK(context, context->allocate_output(0, {size_}, &total));
    float* sum = total->flat<float>().data();
    auto* workers = context->device()->tensorflow_cpu_worker_threads()->workers;
    workers->ParallelFor(stretches, kStretch, [&](int64_t first, int64_t last) {
      for (int64_t stretch = first; stretch < last; ++stretch) {
        float* to = sum + stretch * kStretch;
        std::fill(to, sum + std::min(size_, (stretch + 1) * kStretch), 0.0f);
        for (int64_t row = 0; row < rows; ++row) {
          const int32_t* of_row = start + row * (stretches - 1);
          const int64_t end = stretch < stretches - 1 ? of_row[stretch] : count;
          for (int64_t i = stretch ? of_row[stretch - 1] : 0; i < end; ++i) {
            to[place[row * count + i]] += value[row * count + i];
          }
        }
      }
    });
  }

 private:
  int64_t size_;
};

REGISTER_KERNEL_BUILDER(Name("KerasPsplusAddUp").Device(tensorflow::DEVICE_CPU), AddUp);

}  // namespace
}  // namespace keras_psplus
