#include "attention.cc"

// Both passes at small sizes, each with scratch memory of its own, for AddressSanitizer to watch.
int main() {
  for (int64_t size = 1; size < 40; size += 6) {
    for (int64_t depth = 1; depth < 40; depth += 11) {
      const Sizes n{1, 1, size, size + 5, depth};
      std::vector<float> q(n.queries * depth), k(n.keys * depth), y(q), z(n.queries);
      std::vector<float> bias(n.queries + n.keys - 1), d_bias(bias), dk(k), dv(k), dq(q);
      std::vector<int32_t> ones(n.queries + n.keys, 1);
      const Inputs in{n, q.data(), k.data(), k.data(), bias.data(),
                      ones.data(), ones.data(), ones.data(), ones.data()};
      Scratch one, other;
      forward(in, 0, 0, one, y.data(), z.data());
      backward(in, 0, 0, other, z.data(), y.data(),
               {dq.data(), dk.data(), dv.data(), d_bias.data()});
    }
  }
}
