// Routing: the experts of each token and their weights, from scores in float.

constexpr int ROUTE_TILE = 4;  // tokens, and experts, that are scored at once

// sums (ROWS, ROUTE_TILE); weights: one line per expert.
template <class T, int ROWS>
static void score_tile(const T* x, int64_t x_stride, const float* const* weights, int64_t size,
                       Floats (*sums)[ROUTE_TILE]) {
  for (int64_t c = 0; c < size; c += LANES) {
    Floats lines[ROUTE_TILE];
#pragma GCC unroll 4
    for (int e = 0; e < ROUTE_TILE; ++e) lines[e] = load_part(weights[e] + c, size - c);
#pragma GCC unroll 4
    for (int row = 0; row < ROWS; ++row) {
      const Floats values = load_part(x + row * x_stride + c, size - c);
#pragma GCC unroll 4
      for (int e = 0; e < ROUTE_TILE; ++e) sums[row][e] += values * lines[e];
    }
  }
}

template <class T>
static void score(const Route& call, int64_t token, int64_t expert, float* scores,
                  int64_t stride) {
  const int64_t num_rows = std::min<int64_t>(ROUTE_TILE, call.num_tokens - token);
  const float* weights[ROUTE_TILE];
  for (int e = 0; e < ROUTE_TILE; ++e)  // padded with the last expert
    weights[e] = call.weight + std::min(expert + e, call.num_experts - 1) * call.size;
  const T* x = (const T*)call.x + token * call.x_stride;
  Floats sums[ROUTE_TILE][ROUTE_TILE] = {};
  if (num_rows == ROUTE_TILE)
    score_tile<T, ROUTE_TILE>(x, call.x_stride, weights, call.size, sums);
  else
    for (int64_t row = 0; row < num_rows; ++row)
      score_tile<T, 1>(x + row * call.x_stride, call.x_stride, weights, call.size, sums + row);
  for (int64_t row = 0; row < num_rows; ++row)
    for (int64_t e = expert; e < std::min(expert + ROUTE_TILE, call.num_experts); ++e)
      scores[(token + row) * stride + e] =
          sum(sums[row][e - expert]) + (call.bias ? call.bias[e] : 0.0f);
}

static void softmax(float* scores, int64_t size) {
  const float top = *std::max_element(scores, scores + size);
  for (int64_t i = 0; i < size; i += LANES) {
    const Floats exponent = (load_part(scores + i, size - i) - top) * 1.44269504f;
    store_part(scores + i, power_of_two(exponent), size - i);
  }
  float total = 0.0f;
  for (int64_t i = 0; i < size; ++i) total += scores[i];
  for (int64_t i = 0; i < size; ++i) scores[i] /= total;
}

static void logistic(float* scores, int64_t size) {
  for (int64_t i = 0; i < size; i += LANES)
    store_part(scores + i, times_logistic(splat(1.0f), load_part(scores + i, size - i)), size - i);
}

// Clamps to finite values, so that -INFINITY marks excluded experts. NaN becomes the best value, so
// that it reaches the output and is noticed.
static inline float as_merit(float value) {
  return value == value ? std::min(std::max(value, -FLT_MAX), FLT_MAX) : FLT_MAX;
}

// The first of the largest merits; it is then excluded.
static int64_t take_best(float* merits, int64_t size) {
  const int64_t best = std::max_element(merits, merits + size) - merits;
  merits[best] = -INFINITY;
  return best;
}

// A group is rated by its best expert or, with a correction, by the sum of its best two.
static void exclude_groups(const Route& call, float* merits, float* qualities) {
  const int64_t size = call.num_experts / call.num_groups;
  for (int64_t g = 0; g < call.num_groups; ++g) {
    float *group = merits + g * size, *best = std::max_element(group, group + size);
    qualities[g] = *best;
    if (!call.correction) continue;
    float second = -INFINITY;
    for (float* one = group; one < group + size; ++one)
      if (one != best) second = std::max(second, *one);
    qualities[g] = as_merit(*best + second);
  }
  for (int64_t i = 0; i < call.top_k_groups; ++i) take_best(qualities, call.num_groups);
  for (int64_t g = 0; g < call.num_groups; ++g)
    if (qualities[g] != -INFINITY) std::fill_n(merits + g * size, size, -INFINITY);
}

// scores: those of the token, followed by scratch of twice that size.
static void choose(const Route& call, float* scores, float* weights, int64_t* chosen) {
  const int64_t size = call.num_experts;
  float* merits = scores + size;
  call.is_sigmoid ? logistic(scores, size) : softmax(scores, size);
  for (int64_t e = 0; e < size; ++e)
    merits[e] = as_merit(scores[e] + (call.correction ? call.correction[e] : 0.0f));
  if (call.top_k_groups < call.num_groups) exclude_groups(call, merits, merits + size);
  float total = 1e-20f;
  for (int64_t i = 0; i < call.top_k; ++i) {
    chosen[i] = take_best(merits, size);
    weights[i] = scores[chosen[i]];
    total += weights[i];
  }
  for (int64_t i = 0; i < call.top_k; ++i)
    weights[i] = (call.renormalises ? weights[i] / total : weights[i]) * call.scale;
}

template <class T>
static void route_in_team(const Route& call) {
  const int64_t stride = 3 * call.num_experts;
#pragma omp for collapse(2) nowait
  for (int64_t token = 0; token < call.num_tokens; token += ROUTE_TILE)
    for (int64_t expert = 0; expert < call.num_experts; expert += ROUTE_TILE)
      score<T>(call, token, expert, call.scores, stride);
  wait_for_team();
#pragma omp for nowait
  for (int64_t token = 0; token < call.num_tokens; ++token)
    choose(call, call.scores + token * stride, call.weights + token * call.top_k,
           call.chosen + token * call.top_k);
}

template <class T>
static void route(const Route& call) {
  run_in_team(call.threads, [&] { route_in_team<T>(call); });
}
