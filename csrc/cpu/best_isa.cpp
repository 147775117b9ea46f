// A program that prints the best instruction set of this processor: what a set-up from a checkout compiles for.
#include <cstdio>

#include "processor_isas.hpp"

int main() { std::puts(octavo::processor_isas().front().c_str()); }
