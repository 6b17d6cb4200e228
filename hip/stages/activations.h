// Nonlinear functions that no other stage needs: the router's score and the clamped gate of DeepSeek's experts.
#pragma once
#include "platform/numeric.h"

// Natural logarithm of a positive normal number, by the series of artanh: relative error at most 2e-7.
DEVICE f32 log_exact(f32 x) {
  constexpr f32 LN2 = 0.693147182f, LN2_LOW = -1.90465421e-9f;
  u32 u = bits<u32>(x);
  i32 e = (i32)(u - 0x3f3504f3) >> 23;  // so that the fraction is between sqrt(1/2) and sqrt(2)
  f32 fraction = bits<f32>(u - ((u32)e << 23)), s = (fraction - 1.f) / (fraction + 1.f), square = s * s;
  f32 p = 1.f / 9;
  p = __builtin_fmaf(p, square, 1.f / 7);
  p = __builtin_fmaf(p, square, 1.f / 5);
  p = __builtin_fmaf(p, square, 1.f / 3);
  f32 tail = 2 * s * square * p;
  return __builtin_fmaf((f32)e, LN2, 2 * s + __builtin_fmaf((f32)e, LN2_LOW, tail));
}
// log(1 + x) for x in [0, 1]; what is lost when 1 + x is rounded comes back as a factor.
DEVICE f32 log1p_exact(f32 x) {
  f32 sum = 1.f + x;
  return sum == 1.f ? x : log_exact(sum) * (x / (sum - 1.f));
}
DEVICE f32 softplus(f32 x) { return x > 0 ? x + log1p_exact(exp_exact(-x)) : log1p_exact(exp_exact(x)); }
DEVICE f32 router_score(f32 logit) { return __builtin_sqrtf(softplus(logit)); }

DEVICE f32 clamped_swiglu(f32 gate, f32 up, f32 limit) {
  f32 g = gate < limit ? gate : limit, u = up < limit ? up : limit;
  return silu(g) * (u > -limit ? u : -limit);
}
