// Root mean square normalisation, optionally of a sum with the residual stream.

// If residual is given, it becomes x + residual (rounded to T), and this sum is normalised. The
// normalised value is rounded to the weight's type before the product.
template <class T, class W>
static void rms_norm_row(const T* x, T* residual, const W* weight, T* out, int64_t size,
                         float eps) {
  Floats squares{};
  for (int64_t i = 0; i < size; i += LANES) {
    Floats values = load_part(x + i, size - i);
    if (residual) {
      values = rounded_to<T>(values + load_part(residual + i, size - i));
      store_part(residual + i, values, size - i);
    }
    squares += values * values;
  }
  const float scale = 1.0f / __builtin_sqrtf(sum(squares) / size + eps);
  const T* summed = residual ? residual : x;
  for (int64_t i = 0; i < size; i += LANES) {
    Floats normal = rounded_to<W>(load_part(summed + i, size - i) * scale);
    store_part(out + i, normal * load_part(weight + i, size - i), size - i);
  }
}

template <class T, class W>
static void rms_norm_rows(const RmsNorm& call) {
  const int64_t size = call.size;
#pragma omp for nowait
  for (int64_t row = 0; row < call.num_rows; ++row)
    rms_norm_row((const T*)call.x + row * call.x_stride,
                 call.residual ? (T*)call.residual + row * call.residual_stride : nullptr,
                 (const W*)call.weight, (T*)call.out + row * call.out_stride, size, call.eps);
}

template <class T>
static void rms_norm_in_team(const RmsNorm& call) {
  call.has_float_weight ? rms_norm_rows<T, float>(call) : rms_norm_rows<T, T>(call);
}

template <class T>
static void rms_norm(const RmsNorm& call) {
  run_in_team(call.threads, [&] { rms_norm_in_team<T>(call); });
}
