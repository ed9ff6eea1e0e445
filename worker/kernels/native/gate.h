// Gates of the feed-forward layers: activation(gate) * up.

// x / (1 + e^-y)
static inline Floats times_logistic(Floats x, Floats y) {
  const Floats exponent = y * -1.44269504f;  // of two, for e^-y
  return x / ((exponent > 120.0f ? splat(INFINITY) : power_of_two(exponent)) + 1.0f);
}

// x times the normal cumulative distribution at x. The error function is Hastings' approximation
// (Abramowitz and Stegun, 7.1.26), exact to 1.5e-7.
static inline Floats gelu(Floats x) {
  constexpr float series[] = {0.254829592f, -0.284496736f, 1.421413741f, -1.453152027f,
                              1.061405429f};
  const Floats size = (x < 0.0f ? -x : x) * 0.707106781f;
  const Floats t = 1.0f / (1.0f + 0.3275911f * size);
  Floats sum = splat(series[4]);
  for (int i = 3; i >= 0; --i) sum = sum * t + series[i];
  const Floats tail = 0.5f * sum * t * power_of_two(size * size * -1.44269504f);  // beyond |x|
  return x * (x < 0.0f ? tail : 1.0f - tail);
}

// Intermediate results are rounded as in separate torch operations.
template <class T>
static inline Floats gated(const Gate& gate, Floats x, Floats up) {
  switch (gate.activation) {
    case SILU:
      return rounded_to<T>(times_logistic(x, x)) * up;
    case GELU:
      return rounded_to<T>(gelu(x)) * up;
    case GELU_TANH:  // (1 + tanh y) / 2 is the logistic function of 2 y; 1.59... is 2 sqrt(2 / pi)
      return rounded_to<T>(times_logistic(x, x * (1.0f + 0.044715f * x * x) * 1.59576912f)) * up;
    case CLAMPED_SWIGLU: {
      x = x > gate.limit ? splat(gate.limit) : x;
      up = up > gate.limit ? splat(gate.limit) : up;
      up = up < -gate.limit ? splat(-gate.limit) : up;
      return rounded_to<T>(times_logistic(x, x * gate.alpha)) * rounded_to<T>(up + 1.0f);
    }
  }
  __builtin_unreachable();
}

template <class T>
static void gate_in_team(const GateAndMul& call) {
  const int64_t size = call.size;
#pragma omp for nowait
  for (int64_t row = 0; row < call.num_rows; ++row) {
    const T* gates = (const T*)call.gate_up + row * call.stride;
    T* out = (T*)call.out + row * size;
    for (int64_t i = 0; i < size; i += LANES) {
      const Floats x = load_part(gates + i, size - i), up = load_part(gates + size + i, size - i);
      store_part(out + i, gated<T>(call.gate, x, up), size - i);
    }
  }
}

template <class T>
static void gate(const GateAndMul& call) {
  run_in_team(call.threads, [&] { gate_in_team<T>(call); });
}
