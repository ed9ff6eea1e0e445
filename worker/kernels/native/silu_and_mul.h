// silu(gate) * up, both halves of one line.

template <class T>
static void silu_and_mul_in_team(const SiluAndMul& call) {
  const int64_t size = call.size;
#pragma omp for
  for (int64_t row = 0; row < call.num_rows; ++row) {
    const T* gate = (const T*)call.gate_up + row * call.stride;
    T* out = (T*)call.out + row * size;
    for (int64_t i = 0; i < size; i += LANES) {
      Floats x = load_part(gate + i, size - i);
      Floats exponent = x * -1.44269504f;  // of two, for e^-x
      Floats decay = exponent > 120.0f ? splat(INFINITY) : power_of_two(exponent);
      Floats silu = rounded_to<T>(x / (decay + 1.0f));
      store_part(out + i, silu * load_part(gate + size + i, size - i), size - i);
    }
  }
}

template <class T>
static void silu_and_mul(const SiluAndMul& call) {
#pragma omp parallel num_threads(call.threads) if (call.threads > 1)
  silu_and_mul_in_team<T>(call);
}
