// A gated DeltaNet layer: see delta_step.py.

// N vectors of every row of a state: what keys and queries read, then the update, while these are in
// the cache. COUNT: elements, or 0 for less than a vector.
template <int N>
static void advance_columns(float* const* rows, int64_t first, int64_t count, int64_t key_dim,
                            const float* key, const float* query, float key_query, float decay,
                            float beta, const float* value, float* out) {
  Floats of_key[N] = {}, of_query[N] = {};
  const auto part = [&](int i) { return count - i * LANES; };
  for (int64_t row = 0; row < key_dim; ++row) {
    const float* from = rows[row] + first;
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) {
      const Floats state = N > 1 ? load(from + i * LANES) : load_part(from, count);
      of_key[i] += key[row] * state;
      of_query[i] += query[row] * state;
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) {
    const Floats wanted = load_part(value + first + i * LANES, part(i));
    of_key[i] = beta * (wanted - decay * of_key[i]);  // the correction
    store_part(out + first + i * LANES, decay * of_query[i] + key_query * of_key[i], part(i));
  }
  for (int64_t row = 0; row < key_dim; ++row) {
    float* to = rows[row] + first;
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i)
      if constexpr (N > 1)
        store(to + i * LANES, decay * load(to + i * LANES) + key[row] * of_key[i]);
      else
        store_part(to, decay * load_part(to, count) + key[row] * of_key[i], count);
  }
}

// The scratch of a thread.
template <class T>
struct DeltaScratch {
  float** rows;
  float *query, *key, *value, *key_query, *decay, *beta, *copy;
  T* kept;

  DeltaScratch(const DeltaStep& call, float* memory)
      : rows((float**)memory),
        query(memory + 2 * call.key_dim),
        key(query + PIECE_TOKENS * call.key_dim),
        value(key + PIECE_TOKENS * call.key_dim),
        key_query(value + PIECE_TOKENS * call.value_dim),
        decay(key_query + PIECE_TOKENS),
        beta(decay + PIECE_TOKENS),
        copy(beta + PIECE_TOKENS),
        kept((T*)(copy + call.key_dim * call.value_dim)) {}
};

// One head of values, a few columns of its state after the other.
template <class T>
static void advance_head(const DeltaStep& call, const StatePiece& piece, int64_t head,
                         const DeltaScratch<T>& own) {
  constexpr int WIDE = 4;
  const int64_t key_dim = call.key_dim, value_dim = call.value_dim;
  const HeadState state(piece, head, key_dim, value_dim, own.copy, own.rows);
  for (int64_t i = 0; i < piece.size(); ++i) {
    const float dt = element<T>(call.dt, piece.line(i) * call.dt_stride + head);
    own.decay[i] = expf(softplus(dt + call.dt_bias[head]) * call.decay[head]);
    own.beta[i] = logistic_of(element<T>(call.beta, piece.line(i) * call.beta_stride + head));
  }
  for (int64_t first = 0; first < value_dim;) {
    const bool is_wide = first + WIDE * LANES <= value_dim;
    const auto advance = is_wide ? advance_columns<WIDE> : advance_columns<1>;
    for (int64_t i = 0; i < piece.size(); ++i)
      advance(own.rows, first, value_dim - first, key_dim, own.key + i * key_dim,
              own.query + i * key_dim, own.key_query[i], own.decay[i], own.beta[i],
              own.value + i * value_dim,
              piece.call.out + (piece.line(i) * call.num_heads + head) * value_dim);
    first += is_wide ? WIDE * LANES : LANES;
  }
  state.store();
}

// A head of keys, and the heads of values that it has.
template <class T>
static void delta_step(const DeltaStep& call) {
  const int64_t key_dim = call.key_dim, value_dim = call.value_dim;
  const int64_t num_values = call.num_heads / call.num_key_heads;
  const int64_t key_width = call.num_key_heads * key_dim;
  for_each_group(call.step, call.num_key_heads, [&](const StatePiece& piece, int64_t group,
                                                    float* scratch) {
    const DeltaScratch<T> own(call, scratch);
    convolve(piece, group * key_dim, key_dim, own.kept, own.query);
    convolve(piece, key_width + group * key_dim, key_dim, own.kept, own.key);
    for (int64_t i = 0; i < piece.size(); ++i) {
      float *query = own.query + i * key_dim, *key = own.key + i * key_dim;
      scale(key, key_dim, 1.0f / sqrtf(dot(key, key, key_dim) + call.eps));
      scale(query, key_dim, 1.0f / sqrtf((dot(query, query, key_dim) + call.eps) * key_dim));
      own.key_query[i] = dot(key, query, key_dim);
    }
    for (int64_t head = group * num_values; head < (group + 1) * num_values; ++head) {
      convolve(piece, 2 * key_width + head * value_dim, value_dim, own.kept, own.value);
      advance_head(call, piece, head, own);
    }
  });
}
