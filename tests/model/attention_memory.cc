#include "attention.cc"

template <typename T>
void both_passes(int64_t size, int64_t depth) {
  const Sizes n{1, 1, size, size + 5, depth};
  std::vector<T> q(n.queries * depth), k(n.keys * depth), y(q), dk(k), dv(k), dq(q);
  std::vector<float> z(n.queries), bias(n.queries + n.keys - 1), d_bias(bias);
  std::vector<int32_t> ones(n.queries + n.keys, 1);
  const Inputs in{n, bias.data(), ones.data(), ones.data(), ones.data(), ones.data()};
  const Arrays<const T> read{q.data(), k.data(), k.data()};
  Scratch one, other;
  forward(in, read, 0, 0, one, y.data(), z.data());
  backward(in, read, 0, 0, other, z.data(), y.data(), {dq.data(), dk.data(), dv.data()},
           d_bias.data());
}

// Both passes at small sizes, each with scratch memory of its own, for AddressSanitizer to watch.
int main() {
  for (int64_t size = 1; size < 40; size += 6) {
    for (int64_t depth = 1; depth < 40; depth += 11) {
      both_passes<float>(size, depth);
      both_passes<BFloat16>(size, depth);
    }
  }
}
