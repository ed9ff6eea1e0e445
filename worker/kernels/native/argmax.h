// The lowest index of a line's largest value, ignoring NaN, and the number of its values that are NaN
// or infinite: for these, value - value is not 0. A true comparison is -1 in its lane.

static int64_t argmax_line(const float* line, int64_t size, int32_t& num_non_finite) {
  Floats best = splat(-INFINITY);
  Ints places{}, here, finite{};
  for (int i = 0; i < LANES; ++i) here[i] = i;
  for (int64_t i = 0; i < size; i += LANES, here += LANES) {
    Floats values = load_part(line + i, size - i);
    finite -= values - values == 0.0f;
    if (size - i < LANES) values = here < (int32_t)size ? values : splat(-INFINITY);
    places = values > best ? here : places;
    best = maximum(best, values);
  }
  int64_t num_finite = 0;
  for (int i = 0; i < LANES; ++i) num_finite += finite[i];
  num_non_finite = ceil_div(size, LANES) * LANES - num_finite;  // padding is 0, which is finite
  const float top = largest(best);
  int64_t place = size;
  for (int i = 0; i < LANES; ++i)
    if (best[i] == top) place = std::min<int64_t>(place, places[i]);
  return top == -INFINITY ? 0 : place;
}

static void argmax(const Argmax& call) {
#pragma omp parallel for num_threads(call.threads) if (call.threads > 1)
  for (int64_t row = 0; row < call.num_rows; ++row)
    call.out[row] = argmax_line(call.x + row * call.stride, call.size, call.num_non_finite[row]);
}
