// y = x W^T + b, with matrices packed in panels of PANEL outputs.
//
// A plain panel is (depth, PANEL) words. A word is one weight of an output or, in bfloat16 where there
// are products of it, the weights of two consecutive inputs. MAX_TILE rows are multiplied by a panel
// at once. Other packings (unpack.h) are unpacked to plain words of the same values, CHUNK inputs at a
// time. Every sum is in order of the inputs, so a row's result does not depend on the other rows, nor
// on the packing.

constexpr int64_t MAX_TILE = LANES == 16 ? 12 : LANES == 8 ? 3 : 1;  // sums that fill the registers
constexpr int64_t BLOCK_ROWS = HAS_AMX ? 512 : 192;  // at most, that are multiplied by one panel
constexpr int64_t BLOCK_INPUTS = HAS_AMX ? 1 << 19 : INT64_MAX;  // of a block, which the cache holds
constexpr int64_t CHUNK = 256;         // inputs of a panel that stay in the first cache

// Rows that stay in the cache while panels are read: whole tiles of them.
static inline int64_t block_rows(int64_t in_features) {
  return std::clamp<int64_t>(BLOCK_INPUTS / in_features / 32 * 32, 32, BLOCK_ROWS);
}

// The word of x for the words of a panel at the same depth, in all lanes.
template <class T>
static inline Words broadcast(const T* x, int64_t k) {
  if constexpr (PACK<T> == 2 || sizeof(T) == 4)
    return ((const uint32_t*)x)[k] + Words{};
  else
    return (uint32_t(x[k].bits) << 16) + Words{};
}

// Adds to sums. Not inlined, because the loop needs all registers.
template <class T, int ROWS>
__attribute__((noinline)) static void multiply_panel(const T* x, int64_t x_stride,
                                                     const uint32_t* panel, int64_t depth,
                                                     Floats (*out)[VECTORS]) {
  Floats sums[ROWS][VECTORS];
#pragma GCC unroll 12
  for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
    for (int i = 0; i < VECTORS; ++i) sums[row][i] = out[row][i];
  for (int64_t k = 0; k < depth; ++k) {
    Words weights[VECTORS];
#pragma GCC unroll 8
    for (int i = 0; i < VECTORS; ++i) weights[i] = load(panel + k * PANEL + i * LANES);
#pragma GCC unroll 12
    for (int row = 0; row < ROWS; ++row) {
      const Words inputs = broadcast(x + row * x_stride, k);
#pragma GCC unroll 8
      for (int i = 0; i < VECTORS; ++i)
        sums[row][i] = multiply_add<PACK<T>>(sums[row][i], inputs, weights[i]);
    }
  }
#pragma GCC unroll 12
  for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
    for (int i = 0; i < VECTORS; ++i) out[row][i] = sums[row][i];
}

template <class T, int ROWS = MAX_TILE>
static inline void multiply_tile(int64_t rows, const T* x, int64_t x_stride, const uint32_t* panel,
                                 int64_t depth, Floats (*out)[VECTORS]) {
  if (rows == ROWS) return multiply_panel<T, ROWS>(x, x_stride, panel, depth, out);
  if constexpr (ROWS > 1) multiply_tile<T, ROWS - 1>(rows, x, x_stride, panel, depth, out);
}

#if HAS_AMX
// Sums of one or two tiles of rows, added to `sums` or not.
template <bool TWO, bool ADDS>
static void multiply_pair(const BFloat16* x, int64_t x_stride, const uint32_t* panel, int64_t depth,
                          int64_t step, Floats (*sums)[VECTORS]) {
  constexpr int64_t LINE_BYTES = 4 * PANEL;
  const BFloat16* other = x + TILE * x_stride;
  float *first = (float*)sums, *second = (float*)(sums + TILE);
  if (ADDS) {
    _tile_loadd(0, first, LINE_BYTES);
    _tile_loadd(1, first + LANES, LINE_BYTES);
    if (TWO) {
      _tile_loadd(2, second, LINE_BYTES);
      _tile_loadd(3, second + LANES, LINE_BYTES);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < depth; k += step) {
    _tile_loadd(6, panel + k * PANEL, LINE_BYTES);
    _tile_loadd(7, panel + k * PANEL + LANES, LINE_BYTES);
    _tile_loadd(4, x + 2 * k, 2 * x_stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (TWO) {
      _tile_loadd(5, other + 2 * k, 2 * x_stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, first, LINE_BYTES);
  _tile_stored(1, first + LANES, LINE_BYTES);
  if (TWO) {
    _tile_stored(2, second, LINE_BYTES);
    _tile_stored(3, second + LANES, LINE_BYTES);
  }
}

// Adds to sums if `adds`; finish(row) follows the last product of a row. The order of the sums is that
// of the processor, and the same for any number of rows.
template <class Finish>
static inline void multiply_in_tiles(int64_t num_rows, const BFloat16* x, int64_t x_stride,
                                     const uint32_t* panel, int64_t depth, bool adds,
                                     Floats (*sums)[VECTORS], const Finish& finish) {
  for (int64_t begin = 0, end; begin < depth; begin = end) {
    // All whole steps, then one that is shorter.
    const int64_t left = depth - begin, step = std::min(left, TILE);
    end = begin + left / step * step;
    int64_t configured = 0;
    for (int64_t row = 0; row < num_rows; row += 2 * TILE) {
      const int64_t count = std::min(num_rows - row, 2 * TILE);
      if (count != configured)
        configure_tiles(std::min(count, TILE), std::max<int64_t>(count - TILE, 1), step);
      configured = count;
      const auto multiply =
          adds || begin > 0 ? (count > TILE ? multiply_pair<true, true> : multiply_pair<false, true>)
                            : (count > TILE ? multiply_pair<true, false> : multiply_pair<false, false>);
      multiply(x + row * x_stride + 2 * begin, x_stride, panel + begin * PANEL, end - begin, step,
               sums + row);
      if (end == depth)
        for (int64_t i = row; i < row + count; ++i) finish(i);
    }
  }
  _tile_release();
}

static void multiply_tiles(int64_t num_rows, const BFloat16* x, int64_t x_stride,
                           const uint32_t* panel, int64_t depth, Floats (*sums)[VECTORS]) {
  multiply_in_tiles(num_rows, x, x_stride, panel, depth, true, sums, [](int64_t) {});
}
#endif

// Rows of x in tiles of almost equal size.
template <class T>
static inline void multiply_tiles(int64_t num_rows, const T* x, int64_t x_stride,
                                  const uint32_t* panel, int64_t depth, Floats (*sums)[VECTORS]) {
  const int64_t num_tiles = ceil_div(num_rows, MAX_TILE);
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    const int64_t begin = tile * num_rows / num_tiles;
    const int64_t count = (tile + 1) * num_rows / num_tiles - begin;
    multiply_tile(count, x + begin * x_stride, x_stride, panel, depth, sums + begin);
  }
}

// A matrix of the library's callers. group: of packings with groups. rounds_inputs: see rounded.h.
struct Panels {
  const uint8_t* data;
  Packing packing;
  int64_t group, in_features;
  bool rounds_inputs;

  // Blocks of a record.
  template <class F>
  int64_t blocks() const {
    return F::span(group) / BLOCK;
  }

  // The first one of a panel.
  template <class F>
  const uint8_t* record(int64_t panel) const {
    return data + panel * (in_features / F::span(group)) * F::record_bytes(blocks<F>());
  }
};

#if HAS_AMX
constexpr int64_t PAIR_ROWS = 32;

// Few rows, whose sums stay in tiles. A block is unpacked while the one before it is multiplied.
template <class F>
static void multiply_pair(const uint8_t* record, int64_t blocks, int64_t size, int64_t num_rows,
                         const BFloat16* x, int64_t x_stride, Floats (*sums)[VECTORS]) {
  constexpr int64_t LINE_BYTES = 4 * PANEL, ROWS = 16;
  const int64_t record_bytes = F::record_bytes(blocks), num_blocks = size / BLOCK;
  const bool two = num_rows > ROWS;
  alignas(64) uint32_t words[2][BLOCK / 2 * PANEL];
  configure_tiles(std::min(num_rows, ROWS), std::max<int64_t>(num_rows - ROWS, 1), BLOCK / 2);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  RecordScales scales[VECTORS];
  for (int64_t i = 0, block = 0; i <= num_blocks; ++i) {
    if (i < num_blocks) {
      if (block == 0) load_scales<F>(record, scales);
      fetch_ahead<F>(record, block);
      unpack_block<F>(scales, record, block, [&](int v, int n, Floats a, Floats b) INLINE {
        store(words[i % 2] + n / 2 * PANEL + v * LANES, pair(a, b));
      });
      if (++block == blocks) record += record_bytes, block = 0;
    }
    if (i > 0) {
      const uint32_t* unpacked = words[(i - 1) % 2];
      const BFloat16* inputs = x + (i - 1) * BLOCK;
      _tile_loadd(6, unpacked, LINE_BYTES);
      _tile_loadd(7, unpacked + LANES, LINE_BYTES);
      _tile_loadd(4, inputs, 2 * x_stride);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if (two) {
        _tile_loadd(5, inputs + ROWS * x_stride, 2 * x_stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
  }
  _tile_stored(0, sums, LINE_BYTES);
  _tile_stored(1, (float*)sums + LANES, LINE_BYTES);
  if (two) {
    _tile_stored(2, sums + ROWS, LINE_BYTES);
    _tile_stored(3, (float*)(sums + ROWS) + LANES, LINE_BYTES);
  }
  _tile_release();
}
#endif

// One row. The unpacked values stay in registers.
template <class T, class F>
static void multiply_row(const uint8_t* record, int64_t blocks, int64_t size, const T* x,
                         Floats (&out)[VECTORS]) {
  const int64_t record_bytes = F::record_bytes(blocks);
  Floats sums[VECTORS] = {};
  RecordScales scales[VECTORS];
  for (int64_t input = 0; input < size; record += record_bytes) {
    load_scales<F>(record, scales);
    for (int64_t block = 0; block < blocks; ++block, input += BLOCK) {
      fetch_ahead<F>(record, block);
      unpack_block<F>(scales, record, block, [&](int i, int n, Floats first, Floats second) INLINE {
        const int64_t k = (input + n) / PACK<T>;
        if constexpr (PACK<T> == 2) {
          sums[i] = multiply_add<2>(sums[i], broadcast(x, k), pair(first, second));
        } else {
          sums[i] = multiply_add<1>(sums[i], broadcast(x, k), (Words)rounded_to<T>(first));
          sums[i] = multiply_add<1>(sums[i], broadcast(x, k + 1), (Words)rounded_to<T>(second));
        }
      });
    }
  }
  for (int i = 0; i < VECTORS; ++i) out[i] = sums[i];
}

template <class T>
static inline void store_words(uint32_t* words, int64_t input, int64_t lane, Floats first,
                               Floats second) {
  if constexpr (PACK<T> == 2) return store(words + input / 2 * PANEL + lane, pair(first, second));
  store((float*)words + input * PANEL + lane, rounded_to<T>(first));
  store((float*)words + (input + 1) * PANEL + lane, rounded_to<T>(second));
}

template <class T, class F>
static void multiply_packed(const Panels& panels, int64_t panel, int64_t num_rows, const T* x,
                            int64_t x_stride, Floats (*sums)[VECTORS]) {
  const int64_t blocks = panels.blocks<F>(), record_bytes = F::record_bytes(blocks);
  const uint8_t* record = panels.record<F>(panel);
  const int64_t size = panels.in_features;
  if (num_rows == 1 && !multiplies_tiles<T>)
    return multiply_row<T, F>(record, blocks, size, x, sums[0]);
#if HAS_AMX
  if constexpr (multiplies_tiles<T>)
    if (num_rows <= PAIR_ROWS)
      return multiply_pair<F>(record, blocks, size, num_rows, x, x_stride, sums);
#endif
  alignas(64) uint32_t words[CHUNK / PACK<T> * PANEL];
  RecordScales scales[VECTORS];
  int64_t filled = 0, first = 0, block = 0;
  for (int64_t input = 0; input < panels.in_features; input += BLOCK) {
    if (block == 0) load_scales<F>(record, scales);
    unpack_block<F>(scales, record, block, [&](int i, int n, Floats a, Floats b) INLINE {
      store_words<T>(words, filled + n, i * LANES, a, b);
    });
    filled += BLOCK;
    if (++block == blocks) record += record_bytes, block = 0;
    if (filled < CHUNK && input + BLOCK < panels.in_features) continue;
    multiply_tiles(num_rows, x + first, x_stride, words, filled / PACK<T>, sums);
    first += filled;
    filled = 0;
  }
}

// Rows [first, end) of x, `x_stride` elements apart; rounded ones if the matrix wants that. finish(row,
// sums) gets the VECTORS sums of a row.
template <class T, class Finish>
static inline void multiply_rows(int64_t first, int64_t end, const T* x, int64_t x_stride,
                                 const Panels& panels, int64_t panel, const Finish& finish) {
  Floats sums[BLOCK_ROWS][VECTORS];
  const int64_t most = block_rows(panels.in_features);
  for (int64_t begin = first; begin < end; begin += most) {
    const int64_t count = std::min(end - begin, most);
    const T* rows = x + begin * x_stride;
    const int64_t depth = panels.in_features / PACK<T>;
    const uint32_t* words = (const uint32_t*)panels.data + panel * depth * PANEL;
#if HAS_AMX
    if constexpr (multiplies_tiles<T>)
      if (panels.packing == PLAIN) {
        multiply_in_tiles(count, rows, x_stride, words, depth, false, sums,
                          [&](int64_t row) { finish(begin + row, sums[row]); });
        continue;
      }
#endif
    std::fill_n(&sums[0][0], count * VECTORS, Floats{});
    if (panels.packing == PLAIN) {
      multiply_tiles(count, rows, x_stride, words, depth, sums);
    } else
      with_form(panels.packing, [&](auto form) {
        using F = decltype(form);
        if (panels.rounds_inputs) {
          const int64_t x_bytes = x_stride * sizeof(T);
          multiply_rounded<F>({panels.record<F>(panel), panels.blocks<F>(), panels.in_features,
                               (const uint8_t*)rows, x_bytes},
                              count, sums);
        } else
          multiply_packed<T, F>(panels, panel, count, rows, x_stride, sums);
      });
    for (int64_t row = 0; row < count; ++row) finish(begin + row, sums[row]);
  }
}

// The PANEL elements from `column` on of a line of `size`; zeros after its end or if it is null.
template <class T>
static inline void load_columns(const T* line, int64_t column, int64_t size,
                                Floats (&values)[VECTORS]) {
  for (int i = 0; i < VECTORS; ++i) {
    const int64_t place = column + i * LANES;
    values[i] = line && place < size ? load_part(line + place, size - place) : Floats{};
  }
}

template <class T>
static inline void store_columns(T* line, int64_t column, int64_t size, const Floats* sums,
                                 const Floats (&bias)[VECTORS]) {
  for (int i = 0; i < VECTORS; ++i) {
    const int64_t place = column + i * LANES;
    if (place < size) store_part(line + place, sums[i] + bias[i], size - place);
  }
}

template <class T>
static void linear_in_team(const Linear& call) {
  const int64_t num_panels = ceil_div(call.out_features, PANEL), size = call.out_features;
  const bool rounds = call.rounds_inputs;
  const int64_t most = rounds ? ROUNDED_ROWS : block_rows(call.in_features);
  const int64_t num_blocks = ceil_div(call.num_rows, most);
  const Panels panels{(const uint8_t*)call.panels, call.packing, call.group, call.in_features, rounds};
  static thread_local std::vector<T> rounded;  // of one block
  int64_t rounded_block = -1;
#pragma omp for collapse(2) nowait
  for (int64_t block = 0; block < num_blocks; ++block)
    for (int64_t p = 0; p < num_panels; ++p) {
      const int64_t first = block * call.num_rows / num_blocks;
      const int64_t count = (block + 1) * call.num_rows / num_blocks - first;
      const T* x = (const T*)call.x + first * call.x_stride;
      int64_t x_stride = call.x_stride;
      if (rounds) {
        if (block != rounded_block) {
          rounded.resize(std::max<size_t>(rounded.size(), count * call.in_features));
          for (int64_t row = 0; row < count; ++row)
            round_row(x + row * x_stride, call.in_features, call.packing,
                      rounded.data() + row * call.in_features);
          rounded_block = block;
        }
        x = rounded.data();
        x_stride = call.in_features;
      }
      Floats bias[VECTORS];
      load_columns((const T*)call.bias, p * PANEL, size, bias);
      multiply_rows(0, count, x, x_stride, panels, p, [&](int64_t row, const Floats* sums) {
        store_columns((T*)call.out + (first + row) * call.out_stride, p * PANEL, size, sums, bias);
      });
    }
}

template <class T>
static void linear(const Linear& call) {
  run_in_team(call.threads, [&] { linear_in_team<T>(call); });
}

template <class T, class F>
static void look_up_row(const Panels& panels, int64_t index, T* out) {
  const int64_t blocks = panels.blocks<F>(), record_bytes = F::record_bytes(blocks);
  const int64_t span = blocks * BLOCK, lane = index % PANEL;
  const uint8_t* record = panels.record<F>(index / PANEL);
  for (int64_t first = 0; first < panels.in_features; first += span, record += record_bytes) {
    RecordScales scales[VECTORS];
    load_scales<F>(record, scales);
    for (int64_t block = 0; block < blocks; ++block) {
      float values[BLOCK][PANEL];
      unpack_block<F>(scales, record, block, [&](int i, int n, Floats a, Floats b) INLINE {
        store(&values[n][i * LANES], a);
        store(&values[n + 1][i * LANES], b);
      });
      for (int64_t n = 0; n < BLOCK; n += LANES) {
        Floats line;
        for (int j = 0; j < LANES; ++j) line[j] = values[n + j][lane];
        store(out + first + block * BLOCK + n, line);
      }
    }
  }
}

template <class T>
static void look_up(const LookUp& call) {
  const Panels panels{(const uint8_t*)call.panels, call.packing, call.group, call.in_features, false};
#pragma omp parallel for num_threads(call.threads) if (call.threads > 1)
  for (int64_t row = 0; row < call.num_rows; ++row)
    with_form(panels.packing, [&](auto form) {
      look_up_row<T, decltype(form)>(panels, call.indices[row], (T*)call.out + row * call.in_features);
    });
}
