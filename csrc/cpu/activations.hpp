// The activations of feed-forward networks and the soft cap of scores, in float32.
#pragma once
#include "ops.hpp"
#include "vec.hpp"

namespace octavo::OCTAVO_ISA {

OCTAVO_INLINE F32 silu(F32 x) { return x / (1.0f + exp(-x)); }

OCTAVO_INLINE F32 relu(F32 x) { return x < 0.0f ? F32{} : x; }  // NaN of NaN

// x times the normal distribution function, as max(x, 0) - a T with a = |x| and T = e^(-a a / 2) P(a), the function's lower
// tail. P is the least greatest error, within 2e-7 of T or of T(2), whichever is more, up to a = 5.5 and constant from
// there on: the result is within 1.5e-6 of itself above -3, and below within 1e-8.
OCTAVO_INLINE F32 gelu(F32 x) {
  const F32 a = min(splat(14.0f), magnitude(x));  // T is 0 there; of infinity a T would be no number
  const F32 u = fma(min(splat(5.5f), a), splat(2.0f / 5.5f), splat(-1.0f));
  F32 p = splat(0.00701212697f);
  p = fma(p, u, splat(0.0089842286f));
  p = fma(p, u, splat(0.00168979832f));
  p = fma(p, u, splat(-0.0143698556f));
  p = fma(p, u, splat(0.000925374974f));
  p = fma(p, u, splat(-0.0091516003f));
  p = fma(p, u, splat(0.0203566719f));
  p = fma(p, u, splat(-0.0281030312f));
  p = fma(p, u, splat(0.0425298847f));
  p = fma(p, u, splat(-0.0615431517f));
  p = fma(p, u, splat(0.0840934515f));
  p = fma(p, u, splat(-0.108484492f));
  p = fma(p, u, splat(0.130724758f));
  const F32 power = exp2_not_above_zero(a * a * -0.72134752044f);  // log2(e) / 2
  return fma(-a, p * power, max(F32{}, x));  // NaN of NaN
}

// x (1 + tanh(u)) / 2 = x / (1 + e^(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3).
OCTAVO_INLINE F32 gelu_tanh(F32 x) {
  const F32 u = x * fma(x * x, splat(0.044715f), splat(1.0f)) * 0.79788456080f;
  return x / (1.0f + exp(-2.0f * u));
}

// x / (1 + e^(-1.702 x)): Hendrycks & Gimpel 2016, section 2.
OCTAVO_INLINE F32 quick_gelu(F32 x) { return x / (1.0f + exp(-1.702f * x)); }

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
    case Activation::quick_gelu: return f([](F32 x) { return quick_gelu(x); });
  }
}

}  // namespace octavo::OCTAVO_ISA
