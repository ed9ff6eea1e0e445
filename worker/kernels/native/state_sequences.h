// Sequences through a layer with a recurrent state, token by token: what the layers have in common.
// A part of a state stays in a core's cache over the tokens of a piece, so this is faster than products
// of pieces, and a token has the same bits in chunks of any length.

constexpr int64_t PIECE_TOKENS = 32;  // that are convolved at once, as in state_sequences.py

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

// The tokens [begin, end) of a sequence, at most PIECE_TOKENS. reads: there is a state before the
// sequence's tokens; writes: the state after them is stored. is_stop: after the piece, the state is
// kept, too. stores: where the inputs of the convolution are stored after it.
struct StatePiece {
  const StateStep& call;
  const Sequence& tokens;
  int64_t begin, end;
  PlacedTensor states, inputs, kept_states;
  PlacedTensor stores[2];
  int64_t num_stores;
  bool reads, writes, is_stop;

  int64_t size() const { return end - begin; }
  int64_t line(int64_t i) const { return tokens.first_token + begin + i; }
};

// Calls advance(piece) for the pieces of a sequence, in order. They end at its stops.
template <class F>
static void for_each_piece(const StateStep& call, int64_t index, const F& advance) {
  const Sequence& tokens = call.sequences[index];
  const auto placed = [&](const int32_t* table, int64_t unit) {
    return PlacedTensor{call.pages,      table,           call.block_bytes,
                        call.unit_bytes, call.page_units, unit};
  };
  const int32_t* table = call.block_table + tokens.row * call.table_stride;
  const PlacedTensor states = placed(table, call.first_state_unit);
  const PlacedTensor inputs = placed(table, call.first_kept_unit);
  const bool reads = tokens.num_keys > tokens.num_tokens, writes = tokens.num_keys > 0;
  const int64_t *stop = call.stops + call.first_stops[index],
                *last_stop = call.stops + call.first_stops[index + 1];
  for (int64_t begin = 0, end; begin < tokens.num_tokens; begin = end) {
    end = std::min(begin + PIECE_TOKENS, stop < last_stop ? *stop : tokens.num_tokens);
    const bool is_stop = stop < last_stop && *stop == end;
    const int32_t* stop_table = call.stop_tables + (stop - call.stops) * call.stop_stride;
    StatePiece piece{call,   tokens, begin,   end,
                     states, inputs, placed(stop_table, call.first_state_unit),
                     {},     0,      reads,   writes,
                     is_stop};
    if (is_stop) piece.stores[piece.num_stores++] = placed(stop_table, call.first_kept_unit);
    if (end == tokens.num_tokens && writes) piece.stores[piece.num_stores++] = inputs;
    advance(piece);
    stop += is_stop;
  }
}

// `size` channels from `first` on through the convolution and silu, rounded as in separate torch
// operations: out (tokens of the piece, size). kept: scratch, (conv_width - 1, size).
template <class T>
static void convolve(const StatePiece& piece, int64_t first, int64_t size, T* kept, float* out) {
  const StateStep& call = piece.call;
  const int64_t num_kept = call.conv_width - 1, channels = call.num_channels;
  const T* inputs = (const T*)call.inputs + piece.tokens.first_token * call.input_stride + first;
  const auto place = [&](int64_t tap) { return int64_t((tap * channels + first) * sizeof(T)); };
  const auto input = [&](int64_t token) {
    return token < 0 ? kept + (num_kept + token) * size : inputs + token * call.input_stride;
  };
  for (int64_t tap = 0; piece.begin < num_kept && tap < num_kept; ++tap)
    if (piece.reads)
      piece.inputs.copy<false>(kept + tap * size, place(tap), size * sizeof(T));
    else
      memset(kept + tap * size, 0, size * sizeof(T));
  for (int64_t token = piece.begin; token < piece.end; ++token, out += size)
    for (int64_t i = 0; i < size; i += LANES) {
      Floats sums{};
      if (call.conv_bias) sums = load_part(call.conv_bias + first + i, size - i);
      for (int64_t tap = 0; tap <= num_kept; ++tap)
        sums += load_part(input(token - num_kept + tap) + i, size - i) *
                load_part(call.conv_weight + tap * channels + first + i, size - i);
      sums = rounded_to<T>(sums);
      store_part(out + i, rounded_to<T>(times_logistic(sums, sums)), size - i);
    }
  for (int64_t i = 0; i < piece.num_stores; ++i)
    for (int64_t tap = 0; tap < num_kept; ++tap)
      piece.stores[i].copy<true>((void*)input(piece.end - num_kept + tap), place(tap),
                                 size * sizeof(T));
}

// The rows of a head's state: in its pages, if rows do not cross units, otherwise in `copy`.
struct HeadState {
  const StatePiece& piece;
  int64_t place, num_rows, row_bytes;
  float *copy, **rows;
  bool in_place;

  HeadState(const StatePiece& piece, int64_t head, int64_t num_rows, int64_t row_size, float* copy,
            float** rows)
      : piece(piece),
        place(head * num_rows * row_size * sizeof(float)),
        num_rows(num_rows),
        row_bytes(row_size * sizeof(float)),
        copy(copy),
        rows(rows),
        in_place(piece.writes && piece.states.unit_bytes % row_bytes == 0) {
    for (int64_t row = 0, left; row < num_rows; ++row)
      rows[row] = in_place ? (float*)piece.states.at(place + row * row_bytes, left)
                           : copy + row * row_size;
    if (piece.begin == 0 && !piece.reads)
      for (int64_t row = 0; row < num_rows; ++row) memset(rows[row], 0, row_bytes);
    else if (!in_place)
      piece.states.copy<false>(copy, place, num_rows * row_bytes);
  }

  void store() const {
    if (piece.is_stop)
      for (int64_t row = 0; row < num_rows; ++row)
        piece.kept_states.copy<true>(rows[row], place + row * row_bytes, row_bytes);
    if (!in_place && piece.writes) piece.states.copy<true>(copy, place, num_rows * row_bytes);
  }
};

// Calls advance(piece, group, scratch) for the pieces of each group of channels of each sequence.
template <class F>
static void for_each_group(const StateStep& call, int64_t num_groups, const F& advance) {
#pragma omp parallel for schedule(dynamic) num_threads(call.threads) if (call.threads > 1)
  for (int64_t i = 0; i < call.num_seqs * num_groups; ++i) {
    float* scratch = call.scratch + omp_get_thread_num() * call.scratch_floats;
    for_each_piece(call, i / num_groups,
                   [&](const StatePiece& piece) { advance(piece, i % num_groups, scratch); });
  }
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

static float logistic_of(float x) { return 1.0f / (1.0f + expf(-x)); }

static float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

template <class T>
static float element(const void* values, int64_t index) {
  return load_part((const T*)values + index, 1)[0];
}
