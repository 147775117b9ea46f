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

// The clamped SwiGLU of gpt-oss: quick_gelu of a gate of at most 7, times 1 plus up, which is within -7 and 7.
struct SwigluOai {
  static constexpr float kLimit = 7.0f;
  OCTAVO_INLINE F32 operator()(F32 gate) const { return quick_gelu(min(splat(kLimit), gate)); }  // NaN of NaN
};

// What a gated product makes of both sums: f(gate) * up.
template <typename F>
OCTAVO_INLINE F32 gated(const F& f, F32 gate, F32 up) {
  return f(gate) * up;
}
OCTAVO_INLINE F32 gated(const SwigluOai& f, F32 gate, F32 up) {
  return f(gate) * (max(splat(-f.kLimit), min(splat(f.kLimit), up)) + 1.0f);
}

// e^x - 1 - x for x <= 0, by its series near 0, where the difference would lose the bits of the result.
OCTAVO_INLINE F32 exp_beyond_linear(F32 x) {
  F32 p = splat(1.0f / 3628800.0f);
  p = fma(p, x, splat(1.0f / 362880.0f));
  p = fma(p, x, splat(1.0f / 40320.0f));
  p = fma(p, x, splat(1.0f / 5040.0f));
  p = fma(p, x, splat(1.0f / 720.0f));
  p = fma(p, x, splat(1.0f / 120.0f));
  p = fma(p, x, splat(1.0f / 24.0f));
  p = fma(p, x, splat(1.0f / 6.0f));
  p = fma(p, x, splat(0.5f));
  return x > -1.0f ? p * x * x : exp(x) - 1.0f - x;
}

// positive x^2 + beta x above 0, else negative (e^min(x, eps) - 1 - x) + beta x (Huang & Schlag 2024).
OCTAVO_INLINE F32 xielu(F32 x, float positive, float negative, float beta, float eps) {
  const F32 low = x < eps ? x : splat(eps);
  const F32 below = negative * (exp_beyond_linear(low) + (low - x));
  return fma(splat(beta), x, x > 0.0f ? positive * x * x : below);
}

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
    case Activation::swiglu_oai: return f(SwigluOai{});
    case Activation::relu2: return f([](F32 x) { return relu(x) * relu(x); });
  }
}

}  // namespace octavo::OCTAVO_ISA
