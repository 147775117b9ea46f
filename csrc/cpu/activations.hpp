// The activations of feed-forward networks and the soft cap of scores, in float32.
#pragma once
#include "ops.hpp"
#include "vec.hpp"

namespace octavo::OCTAVO_ISA {

OCTAVO_INLINE F32 silu(F32 x) { return x / (1.0f + exp(-x)); }

// x times the normal distribution function. Its lower tail is erfc(z) / 2 with z = |x| / sqrt(2), and erfc(z) =
// e^(-z z) t P(t), t = 1 / (1 + z / 2); P is a least-squares fit at Chebyshev nodes, within 2e-7 of the value.
OCTAVO_INLINE F32 gelu(F32 x) {
  const F32 z = (x < 0.0f ? -x : x) * 0.70710678118f;
  const F32 t = 1.0f / fma(z, splat(0.5f), splat(1.0f));
  F32 p = splat(-0.06019725f);
  p = fma(p, t, splat(0.28986904f));
  p = fma(p, t, splat(-0.49768485f));
  p = fma(p, t, splat(0.28946814f));
  p = fma(p, t, splat(-0.03403652f));
  p = fma(p, t, splat(0.20562154f));
  p = fma(p, t, splat(0.24241569f));
  p = fma(p, t, splat(0.28246227f));
  p = fma(p, t, splat(0.2820819f));
  const F32 square = z * z;
  const F32 rest = fma(z, z, -square);  // what rounding the square lost: e^-(a + b) = e^-a (1 - b)
  const F32 power = exp(-square);
  const F32 tail = 0.5f * (t * p) * fma(-power, square < 87.0f ? rest : F32{}, power);
  return x * (x < 0.0f ? tail : 1.0f - tail);
}

// x (1 + tanh(u)) / 2 = x / (1 + e^(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3).
OCTAVO_INLINE F32 gelu_tanh(F32 x) {
  const F32 u = x * fma(x * x, splat(0.044715f), splat(1.0f)) * 0.79788456080f;
  return x / (1.0f + exp(-2.0f * u));
}

OCTAVO_INLINE F32 relu(F32 x) { return x < 0.0f ? F32{} : x; }  // NaN of NaN

// cap * tanh(x / cap)
OCTAVO_INLINE F32 soft_capped(F32 x, float cap) {
  const F32 e = exp(x * (2.0f / cap));
  return cap * (1.0f - 2.0f / (e + 1.0f));
}

// Calls f with the function that the activation is.
template <typename F>
OCTAVO_INLINE void with_activation(Activation activation, const F& f) {
  switch (activation) {
    case Activation::none: return f([](F32 x) { return x; });
    case Activation::silu: return f([](F32 x) { return silu(x); });
    case Activation::gelu: return f([](F32 x) { return gelu(x); });
    case Activation::gelu_tanh: return f([](F32 x) { return gelu_tanh(x); });
    case Activation::relu: return f([](F32 x) { return relu(x); });
  }
}

}  // namespace octavo::OCTAVO_ISA
