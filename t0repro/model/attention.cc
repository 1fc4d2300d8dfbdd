// Attention with T5's position bias on a CPU: forward pass and gradients. Queries, keys, values and
// results are float32 or bfloat16; everything is computed in float32.
//
// One task is one head of one row of the batch. It takes a block of queries at a time and computes
// only the panels of keys that some query of the block may see: with packed rows, most of the matrix
// of weights is invisible. Blocks and panels fit into a core's caches, so nothing of the size
// [batch, heads, queries, keys] is ever in memory. The backward pass recomputes the weights from
// one number a query, the logarithm of their sum (FlashAttention: Dao et al., 2022), and adds up the
// bias's gradient by offset, key - query.
//
// Arrays are [batch, length, heads, depth], as the projections leave them. The bias is
// [heads, queries + keys - 1], from offset 1 - queries to keys - 1, or has no such axis.
// A query sees a key of its own segment whose order is at most its own.
//
// A query that sees nothing has a weight of 1 for every key, as in Mesh TensorFlow
// (t0repro.model.attention.attention_weights). Its log_z is infinite here.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <type_traits>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

// ---- Vectors ------------------------------------------------------------------------------------

#if defined(__AVX512F__)
constexpr int kLanes = 16, kTile = 12;
#elif defined(__AVX__)
constexpr int kLanes = 8, kTile = 6;
#else
constexpr int kLanes = 4, kTile = 8;
#endif
constexpr int kPanel = 2 * kLanes;  // columns of a matmul's tile, and keys of a panel
constexpr int kBlock = 24;          // queries of a block
constexpr int kLine = 64;           // bytes of a cache line

typedef float Vector __attribute__((vector_size(4 * kLanes)));
typedef float Unaligned __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef int32_t Integers __attribute__((vector_size(4 * kLanes)));

inline Vector load(const float* x) { return *reinterpret_cast<const Unaligned*>(x); }
inline void store(float* x, Vector y) { *reinterpret_cast<Unaligned*>(x) = y; }
inline Vector all(float x) { return x - Vector{}; }
inline Vector larger(Vector x, Vector y) { return x > y ? x : y; }

inline float sum(Vector x) {
  float total = 0;
  for (int i = 0; i < kLanes; ++i) total += x[i];
  return total;
}

// e to the x, for x <= 0, to 2 units in the last place; 0 below the smallest normal number.
inline Vector exponential(Vector x) {
  const Vector lowest = all(-87.3f);
  const Integers underflows = x < lowest;
  x = underflows ? lowest : x;
  const Vector shift = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vector n = (x * 1.44269504f + shift) - shift;
  Vector r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  Vector p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Integers exponent = (__builtin_convertvector(n, Integers) + 127) << 23;
  Vector power;
  std::memcpy(&power, &exponent, sizeof(power));
  return underflows ? Vector{} : p * power;
}

// ---- Numbers ------------------------------------------------------------------------------------

struct BFloat16 {
  uint16_t bits;
};

inline float widened(float x) { return x; }
inline float widened(BFloat16 x) {
  const uint32_t bits = uint32_t{x.bits} << 16;
  float y;
  std::memcpy(&y, &bits, sizeof(y));
  return y;
}

template <typename T>
inline T rounded(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else {  // to the nearest, of two such to the even one
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    const uint32_t nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return {static_cast<uint16_t>(x == x ? nearest : 0x7fc0)};
  }
}

template <typename T>
inline void write(const float* x, int64_t count, T* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = rounded<T>(x[i]);
}

// ---- Matmuls ------------------------------------------------------------------------------------

// A matrix that is read entry by entry: a block, or its transpose.
struct Factor {
  const float* x;
  int64_t row, column;  // distances between rows and between columns
};

// `rows` rows and kPanel columns of a x b, added to c or written there.
template <int rows, bool add>
inline void tile(Factor a, const float* b, int64_t b_row, int64_t depth, float* c, int64_t c_row) {
  Vector sums[rows][2];
  for (int i = 0; i < rows; ++i) {
    sums[i][0] = add ? load(c + i * c_row) : Vector{};
    sums[i][1] = add ? load(c + i * c_row + kLanes) : Vector{};
  }
  for (int64_t p = 0; p < depth; ++p) {
    const Vector b0 = load(b + p * b_row), b1 = load(b + p * b_row + kLanes);
    const float* column = a.x + p * a.column;
#pragma GCC unroll 12
    for (int i = 0; i < rows; ++i) {
      const Vector entry = all(column[i * a.row]);
      sums[i][0] += entry * b0;
      sums[i][1] += entry * b1;
    }
  }
  for (int i = 0; i < rows; ++i) {
    store(c + i * c_row, sums[i][0]);
    store(c + i * c_row + kLanes, sums[i][1]);
  }
}

template <bool add, int rows = kTile>
void tile_of(int64_t count, Factor a, const float* b, int64_t b_row, int64_t depth, float* c,
             int64_t c_row) {
  if constexpr (rows > 0) {
    if (count == rows) return tile<rows, add>(a, b, b_row, depth, c, c_row);
    tile_of<add, rows - 1>(count, a, b, b_row, depth, c, c_row);
  }
}

// a [rows, depth] x b [depth, columns], columns a multiple of kPanel.
template <bool add>
void matmul(int64_t rows, int64_t columns, int64_t depth, Factor a, const float* b, int64_t b_row,
            float* c, int64_t c_row) {
  for (int64_t j = 0; j < columns; j += kPanel) {
    for (int64_t i = 0; i < rows; i += kTile) {
      const Factor part{a.x + i * a.row, a.row, a.column};
      tile_of<add>(std::min<int64_t>(kTile, rows - i), part, b + j, b_row, depth,
                   c + i * c_row + j, c_row);
    }
  }
}

// ---- One head of one row ------------------------------------------------------------------------

int64_t up_to(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

// Memory that a thread keeps from task to task.
class Scratch {
 public:
  void start(int64_t floats) {
    const int64_t most = floats + kLine / sizeof(float);  // aligning skips part of a cache line
    if (static_cast<int64_t>(memory_.size()) < most) memory_.resize(most);
    const uintptr_t at = reinterpret_cast<uintptr_t>(memory_.data());
    next_ = memory_.data() + (kLine - at % kLine) % kLine / sizeof(float);
  }
  float* take(int64_t floats) {
    float* taken = next_;
    next_ += floats;
    return taken;
  }

 private:
  std::vector<float> memory_;
  float* next_ = nullptr;
};

struct Sizes {
  int64_t batch, heads, queries, keys, depth;
  int64_t padded_keys() const { return up_to(keys, kPanel); }
  int64_t padded_depth() const { return up_to(depth, kPanel); }
  int64_t panels() const { return padded_keys() / kPanel; }
  int64_t row() const { return heads * depth; }  // distance between positions
};

// What all tasks read, beside queries, keys and values.
struct Inputs {
  Sizes sizes;
  const float* bias;  // null if there is none
  const int32_t *query_segments, *key_segments;  // [batch, length]
  const int32_t *query_order, *key_order;        // [batch, length]
  template <typename T>
  T* at(T* x, int64_t length, int64_t row, int64_t head) const {
    return x + row * length * sizes.row() + head * sizes.depth;
  }
};

template <typename T>
struct Arrays {
  T *query, *key, *value;
};

uint64_t bit(int32_t segment) { return uint64_t{1} << (static_cast<uint32_t>(segment) % 64); }

// Which panels the queries of a block may see, and the logits of these.
class Head {
 public:
  Head(const Inputs& in, int64_t row, int64_t head) : in(in), row(row), head(head) {
    const Sizes& n = in.sizes;
    key_segments_.assign(n.padded_keys(), 0);
    key_order_.assign(n.padded_keys(), std::numeric_limits<int32_t>::max());
    const int32_t* segments = in.key_segments + row * n.keys;
    const int32_t* order = in.key_order + row * n.keys;
    std::copy(segments, segments + n.keys, key_segments_.begin());
    std::copy(order, order + n.keys, key_order_.begin());
    panel_bits_.assign(n.panels(), 0);
    panel_order_.assign(n.panels(), std::numeric_limits<int32_t>::max());
    for (int64_t j = 0; j < n.keys; ++j) {
      panel_bits_[j / kPanel] |= bit(segments[j]);
      panel_order_[j / kPanel] = std::min(panel_order_[j / kPanel], order[j]);
    }
    offsets_.assign(n.queries + n.padded_keys() + kPanel, 0.0f);
    if (in.bias) {
      const int64_t count = n.queries + n.keys - 1;
      std::copy(in.bias + head * count, in.bias + (head + 1) * count, offsets_.begin());
    }
  }

  void begin(int64_t first, int64_t count) {
    const int32_t* segments = in.query_segments + row * in.sizes.queries + first;
    const int32_t* order = in.query_order + row * in.sizes.queries + first;
    uint64_t bits = 0;
    int32_t latest = std::numeric_limits<int32_t>::min();
    for (int64_t i = 0; i < count; ++i) {
      bits |= bit(segments[i]);
      latest = std::max(latest, order[i]);
    }
    panels.clear();
    for (int64_t panel = 0; panel < in.sizes.panels(); ++panel) {
      if ((panel_bits_[panel] & bits) && panel_order_[panel] <= latest) panels.push_back(panel);
    }
    first_ = first;
    count_ = count;
  }

  // Logits of the block, [count, panels x kPanel]; minus infinity where nothing is seen.
  // queries: [count, padded depth]; keys: panels of [depth, kPanel].
  void logits(const float* queries, const float* keys, float* result) const {
    const Sizes& n = in.sizes;
    const int64_t width = panels.size() * kPanel;
    const Vector nothing = all(-std::numeric_limits<float>::infinity());
    for (size_t at = 0; at < panels.size(); ++at) {
      const int64_t panel = panels[at];
      float* of_panel = result + at * kPanel;
      matmul<false>(count_, kPanel, n.depth, {queries, n.padded_depth(), 1},
                    keys + panel * n.depth * kPanel, kPanel, of_panel, width);
      for (int64_t i = 0; i < count_; ++i) {
        const int64_t q = row * n.queries + first_ + i;
        const int32_t segment = in.query_segments[q], order = in.query_order[q];
        const float* bias = offsets_.data() + n.queries - 1 - (first_ + i) + panel * kPanel;
        for (int part = 0; part < kPanel; part += kLanes) {
          Integers key_segment, key_order;
          std::memcpy(&key_segment, &key_segments_[panel * kPanel + part], sizeof(Integers));
          std::memcpy(&key_order, &key_order_[panel * kPanel + part], sizeof(Integers));
          const Integers visible = (key_segment == segment) & (key_order <= order) &
                                   (key_order != std::numeric_limits<int32_t>::max());
          float* x = of_panel + i * width + part;
          store(x, visible ? load(x) + load(bias + part) : nothing);
        }
      }
    }
  }

  const Inputs& in;
  const int64_t row, head;
  std::vector<int64_t> panels;

 private:
  std::vector<int32_t> key_segments_, key_order_, panel_order_;
  std::vector<uint64_t> panel_bits_;
  std::vector<float> offsets_;
  int64_t first_ = 0, count_ = 0;
};

// [length, depth] of a head as panels of [depth, kPanel], zero beyond the length.
template <typename T>
void transpose(const T* x, const Sizes& n, float* panels) {
  for (int64_t start = 0; start < n.padded_keys(); start += kPanel) {
    float* panel = panels + start * n.depth;
    for (int64_t j = 0; j < kPanel; ++j) {
      if (start + j < n.keys) {
        const T* from = x + (start + j) * n.row();
        for (int64_t p = 0; p < n.depth; ++p) panel[p * kPanel + j] = widened(from[p]);
      } else {
        for (int64_t p = 0; p < n.depth; ++p) panel[p * kPanel + j] = 0;
      }
    }
  }
}

// `length` positions of a head, side by side, zero beyond the depth and up to `padded` positions.
template <typename T>
void gather(const T* x, const Sizes& n, int64_t length, int64_t padded, float* rows) {
  const int64_t width = n.padded_depth();
  for (int64_t j = 0; j < padded; ++j) {
    const int64_t copied = j < length ? n.depth : 0;
    for (int64_t p = 0; p < copied; ++p) rows[j * width + p] = widened(x[j * n.row() + p]);
    std::fill(rows + j * width + copied, rows + (j + 1) * width, 0.0f);
  }
}

template <typename T>
void forward(const Inputs& in, const Arrays<const T>& read, int64_t row, int64_t head,
             Scratch& scratch, T* y, float* log_z) {
  const Sizes& n = in.sizes;
  const int64_t depth = n.padded_depth();
  scratch.start(n.padded_keys() * (n.depth + depth + kBlock) + 2 * kBlock * depth);
  float* keys = scratch.take(n.padded_keys() * n.depth);
  float* values = scratch.take(n.padded_keys() * depth);
  float* weights = scratch.take(n.padded_keys() * kBlock);
  float* queries = scratch.take(kBlock * depth);
  float* sums = scratch.take(kBlock * depth);
  Head block(in, row, head);
  transpose(in.at(read.key, n.keys, row, head), n, keys);
  gather(in.at(read.value, n.keys, row, head), n, n.keys, n.padded_keys(), values);
  const T* query = in.at(read.query, n.queries, row, head);
  y = in.at(y, n.queries, row, head);
  log_z += (row * n.heads + head) * n.queries;

  for (int64_t first = 0; first < n.queries; first += kBlock) {
    const int64_t count = std::min<int64_t>(kBlock, n.queries - first);
    block.begin(first, count);
    const int64_t width = block.panels.size() * kPanel;
    gather(query + first * n.row(), n, count, kBlock, queries);
    block.logits(queries, keys, weights);
    float scale[kBlock];
    for (int64_t i = 0; i < count; ++i) {
      float* x = weights + i * width;
      Vector most = all(-std::numeric_limits<float>::infinity());
      for (int64_t j = 0; j < width; j += kLanes) most = larger(load(x + j), most);
      float maximum = most[0];
      for (int lane = 1; lane < kLanes; ++lane) maximum = std::max(maximum, most[lane]);
      if (maximum == -std::numeric_limits<float>::infinity()) {  // it sees nothing
        std::fill(x, x + width, 0.0f);
        scale[i] = 0;
        log_z[first + i] = std::numeric_limits<float>::infinity();
        continue;
      }
      Vector total{};
      for (int64_t j = 0; j < width; j += kLanes) {
        const Vector weight = exponential(load(x + j) - maximum);
        store(x + j, weight);
        total += weight;
      }
      const float z = sum(total);
      scale[i] = 1 / z;
      log_z[first + i] = maximum + std::log(z);
    }
    std::fill(sums, sums + kBlock * depth, 0.0f);
    for (size_t at = 0; at < block.panels.size(); ++at) {
      matmul<true>(count, depth, kPanel, {weights + at * kPanel, width, 1},
                   values + block.panels[at] * kPanel * depth, depth, sums, depth);
    }
    for (int64_t i = 0; i < count; ++i) {
      float* sum = sums + i * depth;
      if (scale[i]) {
        for (int64_t p = 0; p < n.depth; ++p) sum[p] *= scale[i];
      } else {
        for (int64_t j = 0; j < n.keys; ++j) {
          for (int64_t p = 0; p < n.depth; ++p) sum[p] += values[j * depth + p];
        }
      }
      write(sum, n.depth, y + (first + i) * n.row());
    }
  }
}

// d_bias: [batch, heads, offsets].
template <typename T>
void backward(const Inputs& in, const Arrays<const T>& read, int64_t row, int64_t head,
              Scratch& scratch, const float* log_z, const T* d_y, const Arrays<T>& out,
              float* d_bias_out) {
  const Sizes& n = in.sizes;
  const int64_t depth = n.padded_depth(), all_keys = n.padded_keys();
  const int64_t offsets = n.queries + n.keys - 1;
  scratch.start(all_keys * (2 * n.depth + 4 * depth + 2 * kBlock) + 3 * kBlock * depth +
                up_to(n.queries + all_keys, kPanel));
  float* keys_across = scratch.take(all_keys * n.depth);
  float* values_across = scratch.take(all_keys * n.depth);
  float* keys = scratch.take(all_keys * depth);
  float* values = scratch.take(all_keys * depth);
  float* d_key = scratch.take(all_keys * depth);
  float* d_value = scratch.take(all_keys * depth);
  float* weights = scratch.take(all_keys * kBlock);
  float* d_weights = scratch.take(all_keys * kBlock);
  float* queries = scratch.take(kBlock * depth);
  float* d_ys = scratch.take(kBlock * depth);
  float* d_query = scratch.take(kBlock * depth);
  float* d_bias = scratch.take(up_to(n.queries + all_keys, kPanel));
  Head block(in, row, head);
  transpose(in.at(read.key, n.keys, row, head), n, keys_across);
  transpose(in.at(read.value, n.keys, row, head), n, values_across);
  gather(in.at(read.key, n.keys, row, head), n, n.keys, all_keys, keys);
  gather(in.at(read.value, n.keys, row, head), n, n.keys, all_keys, values);
  std::fill(d_key, d_key + all_keys * depth, 0.0f);
  std::fill(d_value, d_value + all_keys * depth, 0.0f);
  std::fill(d_bias, d_bias + n.queries + all_keys, 0.0f);
  const T* query = in.at(read.query, n.queries, row, head);
  d_y = in.at(d_y, n.queries, row, head);
  log_z += (row * n.heads + head) * n.queries;

  for (int64_t first = 0; first < n.queries; first += kBlock) {
    const int64_t count = std::min<int64_t>(kBlock, n.queries - first);
    block.begin(first, count);
    const int64_t width = block.panels.size() * kPanel;
    gather(query + first * n.row(), n, count, kBlock, queries);
    gather(d_y + first * n.row(), n, count, kBlock, d_ys);
    block.logits(queries, keys_across, weights);
    for (size_t at = 0; at < block.panels.size(); ++at) {
      matmul<false>(count, kPanel, n.depth, {d_ys, depth, 1},
                    values_across + block.panels[at] * kPanel * n.depth, kPanel,
                    d_weights + at * kPanel, width);
    }
    for (int64_t i = 0; i < count; ++i) {
      // Infinite for a query that sees nothing: its weights are 0 here and treated below.
      const float z = log_z[first + i];
      float *x = weights + i * width, *dx = d_weights + i * width;
      Vector total{};
      if (std::isinf(z)) {
        std::fill(x, x + width, 0.0f);
      } else {
        for (int64_t j = 0; j < width; j += kLanes) {
          const Vector weight = exponential(load(x + j) - z);
          store(x + j, weight);
          total += weight * load(dx + j);
        }
      }
      const float mean = sum(total);
      for (int64_t j = 0; j < width; j += kLanes) {
        store(dx + j, load(x + j) * (load(dx + j) - mean));
      }
      if (in.bias) {
        for (size_t at = 0; at < block.panels.size(); ++at) {
          float* to = d_bias + n.queries - 1 - (first + i) + block.panels[at] * kPanel;
          store(to, load(to) + load(dx + at * kPanel));
          store(to + kLanes, load(to + kLanes) + load(dx + at * kPanel + kLanes));
        }
      }
    }
    std::fill(d_query, d_query + kBlock * depth, 0.0f);
    for (size_t at = 0; at < block.panels.size(); ++at) {
      const int64_t start = block.panels[at] * kPanel * depth;
      matmul<true>(count, depth, kPanel, {d_weights + at * kPanel, width, 1}, keys + start, depth,
                   d_query, depth);
      matmul<true>(kPanel, depth, count, {d_weights + at * kPanel, 1, width}, queries, depth,
                   d_key + start, depth);
      matmul<true>(kPanel, depth, count, {weights + at * kPanel, 1, width}, d_ys, depth,
                   d_value + start, depth);
    }
    for (int64_t i = 0; i < count; ++i) {
      const float *dy = d_ys + i * depth, *q = queries + i * depth;
      const bool unread = std::all_of(dy, dy + n.depth, [](float x) { return x == 0; });
      if (!std::isinf(log_z[first + i]) || unread) continue;
      float* dq = d_query + i * depth;
      float mean = 0;
      for (int64_t j = 0; j < n.keys; ++j) {
        for (int64_t p = 0; p < n.depth; ++p) mean += dy[p] * values[j * depth + p] / n.keys;
      }
      for (int64_t j = 0; j < n.keys; ++j) {
        float d_logit = -mean;
        for (int64_t p = 0; p < n.depth; ++p) d_logit += dy[p] * values[j * depth + p];
        for (int64_t p = 0; p < n.depth; ++p) {
          d_value[j * depth + p] += dy[p];
          d_key[j * depth + p] += d_logit * q[p];
          dq[p] += d_logit * keys[j * depth + p];
        }
        d_bias[n.queries - 1 - (first + i) + j] += d_logit;
      }
    }
    T* to = in.at(out.query, n.queries, row, head) + first * n.row();
    for (int64_t i = 0; i < count; ++i) write(d_query + i * depth, n.depth, to + i * n.row());
  }
  T* to_key = in.at(out.key, n.keys, row, head);
  T* to_value = in.at(out.value, n.keys, row, head);
  for (int64_t j = 0; j < n.keys; ++j) {
    write(d_key + j * depth, n.depth, to_key + j * n.row());
    write(d_value + j * depth, n.depth, to_value + j * n.row());
  }
  if (in.bias) write(d_bias, offsets, d_bias_out + (row * n.heads + head) * offsets);
}

// ---- All heads, on XLA's threads ----------------------------------------------------------------

// Runs the tasks on the calling thread and on whichever threads of the pool are free. The caller
// needs no other thread, so a pool whose threads all wait in here still goes on.
void on_threads(ffi::ThreadPool pool, int64_t tasks, std::function<void(int64_t, Scratch&)> task) {
  struct State {
    std::function<void(int64_t, Scratch&)> task;
    std::atomic<int64_t> next{0};
    int64_t done = 0;
    std::mutex mutex;
    std::condition_variable finished;
  };
  auto state = std::make_shared<State>();
  state->task = std::move(task);
  auto work = [state, tasks] {
    static thread_local Scratch scratch;
    int64_t did = 0;
    for (int64_t i; (i = state->next.fetch_add(1)) < tasks; ++did) state->task(i, scratch);
    if (did == 0) return;
    std::lock_guard<std::mutex> lock(state->mutex);
    state->done += did;
    if (state->done == tasks) state->finished.notify_all();
  };
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), tasks) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule(std::function<void()>(work));
  work();
  std::unique_lock<std::mutex> lock(state->mutex);
  state->finished.wait(lock, [&] { return state->done == tasks; });
}

using Floats2 = ffi::Buffer<ffi::F32, 2>;
using Floats3 = ffi::Buffer<ffi::F32, 3>;
using Integers2 = ffi::Buffer<ffi::S32, 2>;
// Float32 or bfloat16, all of a call alike: [batch, length, heads, depth].
using Numbers = ffi::AnyBuffer;

Inputs inputs(Numbers query, Numbers key, Floats2 bias, Integers2 query_segments,
              Integers2 key_segments, Integers2 query_order, Integers2 key_order) {
  const auto q = query.dimensions();
  const Sizes sizes{q[0], q[2], q[1], key.dimensions()[1], q[3]};
  const bool biased = bias.dimensions()[1] == sizes.queries + sizes.keys - 1;
  return {sizes,
          biased ? bias.typed_data() : nullptr,
          query_segments.typed_data(),
          key_segments.typed_data(),
          query_order.typed_data(),
          key_order.typed_data()};
}

template <typename T>
T* data(Numbers x) {
  return static_cast<T*>(x.untyped_data());
}

// Calls the function with a number of the type that an array holds.
template <typename Function>
ffi::Error by_type(Numbers x, Function function) {
  if (x.element_type() == ffi::BF16) {
    function(BFloat16{});
  } else {
    function(float{});
  }
  return ffi::Error::Success();
}

ffi::Error forward_call(ffi::ThreadPool pool, Numbers query, Numbers key, Numbers value,
                        Floats2 bias, Integers2 query_segments, Integers2 key_segments,
                        Integers2 query_order, Integers2 key_order, ffi::Result<Numbers> y,
                        ffi::Result<Floats3> log_z) {
  const Inputs in = inputs(query, key, bias, query_segments, key_segments, query_order, key_order);
  return by_type(query, [&](auto number) {
    using T = decltype(number);
    const Arrays<const T> read{data<T>(query), data<T>(key), data<T>(value)};
    T* to = data<T>(*y);
    float* z = log_z->typed_data();
    const int64_t heads = in.sizes.heads;
    on_threads(pool, in.sizes.batch * heads, [=](int64_t task, Scratch& scratch) {
      forward(in, read, task / heads, task % heads, scratch, to, z);
    });
  });
}

ffi::Error backward_call(ffi::ThreadPool pool, Numbers query, Numbers key, Numbers value,
                         Floats2 bias, Integers2 query_segments, Integers2 key_segments,
                         Integers2 query_order, Integers2 key_order, Floats3 log_z, Numbers d_y,
                         ffi::Result<Numbers> d_query, ffi::Result<Numbers> d_key,
                         ffi::Result<Numbers> d_value, ffi::Result<Floats3> d_bias) {
  const Inputs in = inputs(query, key, bias, query_segments, key_segments, query_order, key_order);
  return by_type(query, [&](auto number) {
    using T = decltype(number);
    const Arrays<const T> read{data<T>(query), data<T>(key), data<T>(value)};
    const Arrays<T> out{data<T>(*d_query), data<T>(*d_key), data<T>(*d_value)};
    const float* z = log_z.typed_data();
    const T* dy = data<T>(d_y);
    float* to_bias = d_bias->typed_data();
    const int64_t heads = in.sizes.heads;
    on_threads(pool, in.sizes.batch * heads, [=](int64_t task, Scratch& scratch) {
      backward(in, read, task / heads, task % heads, scratch, z, dy, out, to_bias);
    });
  });
}

// What both functions are given: query, key, value, bias, and who sees whom.
auto bound_inputs() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<Numbers>()
      .Arg<Numbers>()
      .Arg<Numbers>()
      .Arg<Floats2>()
      .Arg<Integers2>()
      .Arg<Integers2>()
      .Arg<Integers2>()
      .Arg<Integers2>();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(t0repro_attention, forward_call,
                              bound_inputs()
                                  .Ret<Numbers>()
                                  .Ret<Floats3>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(t0repro_attention_gradients, backward_call,
                              bound_inputs()
                                  .Arg<Floats3>()
                                  .Arg<Numbers>()
                                  .Ret<Numbers>()
                                  .Ret<Numbers>()
                                  .Ret<Numbers>()
                                  .Ret<Floats3>());
