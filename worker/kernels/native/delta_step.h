// Sequences through a gated DeltaNet layer, token by token: see delta_step.py. The state of a head of
// values stays in a core's cache over many tokens, so this is faster than products of pieces.

// Where a tensor of a layer's states is in the pages of one sequence.
struct PlacedTensor {
  uint8_t* pages;
  const int32_t* table;
  int64_t block_bytes, unit_bytes, page_units, first_unit;

  // The address of the byte at `offset`; `left` is how many follow it in its unit.
  uint8_t* at(int64_t offset, int64_t& left) const {
    const int64_t unit = first_unit + offset / unit_bytes, rest = offset % unit_bytes;
    left = unit_bytes - rest;
    return pages + table[unit / page_units] * block_bytes + unit % page_units * unit_bytes + rest;
  }

  template <bool IS_WRITE>
  void copy(void* memory, int64_t offset, int64_t num_bytes) const {
    for (int64_t done = 0, left; done < num_bytes; done += left) {
      uint8_t* stored = at(offset + done, left);
      left = std::min(left, num_bytes - done);
      uint8_t* own = (uint8_t*)memory + done;
      IS_WRITE ? memcpy(stored, own, left) : memcpy(own, stored, left);
    }
  }
};

// The tokens of one sequence. reads: there is a state before them; writes: the state is stored.
struct DeltaSequence {
  const Sequence& tokens;
  PlacedTensor states, kept;
  bool reads, writes;
};

// The stored inputs of the convolution after `end` tokens: the last ones before it. kept: those before
// the step, (conv_width - 1, size).
template <class T>
static void store_inputs(const DeltaStep& call, const T* inputs, const PlacedTensor& stored,
                         int64_t first, int64_t size, int64_t end, const T* kept) {
  const int64_t num_kept = call.conv_width - 1;
  for (int64_t tap = 0; tap < num_kept; ++tap) {
    const int64_t token = end - num_kept + tap;
    const T* from =
        token < 0 ? kept + (num_kept + token) * size : inputs + token * call.input_stride + first;
    stored.copy<true>((void*)from, (tap * call.num_channels + first) * sizeof(T),
                      size * sizeof(T));
  }
}

// `size` channels from `first` on of the tokens [begin, end) through the convolution and silu,
// rounded as in separate torch operations. kept: scratch, (conv_width - 1) * size. stores: where the
// inputs before `end` are stored.
template <class T>
static void convolve(const DeltaStep& call, const DeltaSequence& seq, int64_t begin, int64_t end,
                     const PlacedTensor* stores, int64_t num_stores, int64_t first, int64_t size,
                     T* kept, float* out) {
  const int64_t num_kept = call.conv_width - 1, line = call.num_channels;
  const T* inputs = (const T*)call.inputs + seq.tokens.first_token * call.input_stride;
  if (begin < num_kept)
    for (int64_t tap = 0; tap < num_kept; ++tap) {
      T* to = kept + tap * size;
      if (seq.reads)
        seq.kept.copy<false>(to, (tap * line + first) * sizeof(T), size * sizeof(T));
      else
        memset(to, 0, size * sizeof(T));
    }
  for (int64_t token = begin; token < end; ++token, out += size)
    for (int64_t i = 0; i < size; i += LANES) {
      Floats sums{};
      for (int64_t tap = 0; tap <= num_kept; ++tap) {
        const int64_t at = token - num_kept + tap;
        const T* from =
            at < 0 ? kept + (num_kept + at) * size : inputs + at * call.input_stride + first;
        sums += load_part(from + i, size - i) *
                load_part(call.conv_weight + tap * line + first + i, size - i);
      }
      sums = rounded_to<T>(sums);
      store_part(out + i, rounded_to<T>(times_logistic(sums, sums)), size - i);
    }
  for (int64_t i = 0; i < num_stores; ++i)
    store_inputs(call, inputs, stores[i], first, size, end, kept);
}

static float dot(const float* a, const float* b, int64_t size) {
  Floats sums{};
  for (int64_t i = 0; i < size; i += LANES)
    sums += load_part(a + i, size - i) * load_part(b + i, size - i);
  return sum(sums);
}

static void scale(float* values, int64_t size, float factor) {
  for (int64_t i = 0; i < size; i += LANES)
    store_part(values + i, load_part(values + i, size - i) * factor, size - i);
}

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

static float logistic_of(float x) { return 1.0f / (1.0f + expf(-x)); }

static float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

template <class T>
static float element(const void* values, int64_t index) {
  return load_part((const T*)values + index, 1)[0];
}

constexpr int64_t PIECE_TOKENS = 32;  // that are convolved at once

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

// One head of values over the tokens [begin, end), a few columns of its state after the other: these
// stay in the cache from token to token. kept: where the state after them is kept, or null.
template <class T>
static void advance_head(const DeltaStep& call, const DeltaSequence& seq, int64_t begin,
                         int64_t end, const PlacedTensor* kept, int64_t head,
                         const DeltaScratch<T>& own) {
  constexpr int WIDE = 4;
  const int64_t key_dim = call.key_dim, value_dim = call.value_dim;
  const int64_t row_bytes = value_dim * sizeof(float), place = head * key_dim * row_bytes;
  const bool in_place = seq.writes && seq.states.unit_bytes % row_bytes == 0;
  for (int64_t row = 0, left; row < key_dim; ++row)
    own.rows[row] = in_place ? (float*)seq.states.at(place + row * row_bytes, left)
                             : own.copy + row * value_dim;
  if (begin == 0 && !seq.reads)
    for (int64_t row = 0; row < key_dim; ++row) memset(own.rows[row], 0, row_bytes);
  else if (!in_place)
    seq.states.copy<false>(own.copy, place, key_dim * row_bytes);
  for (int64_t token = begin; token < end; ++token) {
    const int64_t line = seq.tokens.first_token + token, i = token - begin;
    const float dt = element<T>(call.dt, line * call.dt_stride + head);
    own.decay[i] = expf(softplus(dt + call.dt_bias[head]) * call.decay[head]);
    own.beta[i] = logistic_of(element<T>(call.beta, line * call.beta_stride + head));
  }
  for (int64_t first = 0; first < value_dim;) {
    const bool is_wide = first + WIDE * LANES <= value_dim;
    for (int64_t i = 0; i < end - begin; ++i) {
      const int64_t line = seq.tokens.first_token + begin + i;
      const auto advance = is_wide ? advance_columns<WIDE> : advance_columns<1>;
      advance(own.rows, first, value_dim - first, key_dim, own.key + i * key_dim,
              own.query + i * key_dim, own.key_query[i], own.decay[i], own.beta[i],
              own.value + i * value_dim, call.out + (line * call.num_heads + head) * value_dim);
    }
    first += is_wide ? WIDE * LANES : LANES;
  }
  if (kept)
    for (int64_t row = 0; row < key_dim; ++row)
      kept->copy<true>(own.rows[row], place + row * row_bytes, row_bytes);
  if (!in_place && seq.writes) seq.states.copy<true>(own.copy, place, key_dim * row_bytes);
}

// A head of keys and the heads of values that it has, over the tokens of a sequence. The stops are
// those of the sequence.
template <class T>
static void advance_group(const DeltaStep& call, int64_t index, int64_t group, float* scratch) {
  const Sequence& tokens = call.sequences[index];
  const int64_t key_dim = call.key_dim, value_dim = call.value_dim;
  const int64_t num_values = call.num_heads / call.num_key_heads;
  const int64_t key_width = call.num_key_heads * key_dim;
  const auto placed = [&](const int32_t* table, int64_t unit) {
    return PlacedTensor{call.pages,      table,           call.block_bytes,
                        call.unit_bytes, call.page_units, unit};
  };
  const int32_t* table = call.block_table + tokens.row * call.table_stride;
  const DeltaSequence seq{tokens, placed(table, call.first_state_unit),
                          placed(table, call.first_kept_unit), tokens.num_keys > tokens.num_tokens,
                          tokens.num_keys > 0};
  const DeltaScratch<T> own(call, scratch);
  const int64_t* stop = call.stops + call.first_stops[index];
  const int64_t* last_stop = call.stops + call.first_stops[index + 1];
  for (int64_t begin = 0, end; begin < tokens.num_tokens; begin = end) {
    end = std::min(begin + PIECE_TOKENS, stop < last_stop ? *stop : tokens.num_tokens);
    const bool is_stop = stop < last_stop && *stop == end, is_last = end == tokens.num_tokens;
    const int32_t* stop_table = call.stop_tables + (stop - call.stops) * call.stop_stride;
    PlacedTensor stores[2];
    int64_t num_stores = 0;
    if (is_stop) stores[num_stores++] = placed(stop_table, call.first_kept_unit);
    if (is_last && seq.writes) stores[num_stores++] = seq.kept;
    const PlacedTensor kept = placed(stop_table, call.first_state_unit);
    const auto convolve_to = [&](int64_t first, int64_t size, float* out) {
      convolve(call, seq, begin, end, stores, num_stores, first, size, own.kept, out);
    };
    convolve_to(group * key_dim, key_dim, own.query);
    convolve_to(key_width + group * key_dim, key_dim, own.key);
    for (int64_t i = 0; i < end - begin; ++i) {
      float *query = own.query + i * key_dim, *key = own.key + i * key_dim;
      scale(key, key_dim, 1.0f / sqrtf(dot(key, key, key_dim) + call.eps));
      scale(query, key_dim, 1.0f / sqrtf((dot(query, query, key_dim) + call.eps) * key_dim));
      own.key_query[i] = dot(key, query, key_dim);
    }
    for (int64_t head = group * num_values; head < (group + 1) * num_values; ++head) {
      convolve_to(2 * key_width + head * value_dim, value_dim, own.value);
      advance_head(call, seq, begin, end, is_stop ? &kept : nullptr, head, own);
    }
    stop += is_stop;
  }
}

template <class T>
static void delta_step(const DeltaStep& call) {
  const int64_t num_groups = call.num_seqs * call.num_key_heads;
#pragma omp parallel for schedule(dynamic) num_threads(call.threads) if (call.threads > 1)
  for (int64_t i = 0; i < num_groups; ++i)
    advance_group<T>(call, i / call.num_key_heads, i % call.num_key_heads,
                     call.scratch + omp_get_thread_num() * call.scratch_floats);
}
