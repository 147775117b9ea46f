// A program that prints this processor's best instruction sets, of floats and of integers: what a set-up from a checkout
// compiles for.
#include <cstdio>

#include "processor_isas.hpp"

int main() {
  const octavo::IsaNames names = octavo::processor_isas();
  std::printf("%s %s\n", names.floats.front().c_str(), names.integers.front().c_str());
}
