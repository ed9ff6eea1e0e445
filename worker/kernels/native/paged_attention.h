// Causal attention over the paged cache, read in place through the block table.
//
// A task is a tile of consecutive new tokens of one sequence, one or more of its KV heads, and a part
// of its context. All query heads that share a KV head are rows of one small product, so keys and
// values are read once. BLOCK_KEYS keys at a time are packed for the processor (keys transposed),
// multiplied, and accumulated with an online softmax (Milakov and Gimelshein, 2018). For short chunks
// the context is cut into parts of PART_KEYS, which are merged in order (Flash-Decoding, Dao et al.,
// 2023). The cuts depend only on the sequence itself, not on the batch or the number of threads, so
// neither changes its result.

constexpr int64_t MAX_ROWS = LANES == 16 ? 8 : 4;  // of one product; accumulators fill the registers

// Elements per word in products: bfloat16 in pairs if the processor can, otherwise single floats.
template <class T>
constexpr int64_t PACK = HAS_BF16_DOT && sizeof(T) == 2 ? 2 : 1;

// Into the L2 cache, which holds more than the L1 cache and has more outstanding reads: a head's
// keys of a block are one run of a few KiB, too short for the processor to recognise and read ahead.
static inline void prefetch(const void* line) { __builtin_prefetch(line, 0, 2); }

static inline int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

template <int64_t PACKED>
static inline Floats multiply_add(Floats sum, Words a, Words b) {
#if HAS_BF16_DOT
  if constexpr (PACKED == 2)
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#endif
  return sum + (Floats)a * (Floats)b;
}

// c (ROWS, VECTORS * LANES) = a (ROWS, depth) b (depth, VECTORS * LANES), added to c or not.
template <int64_t PACKED, int ROWS, int VECTORS>
static inline void product_block(const uint32_t* a, int64_t a_stride, const uint32_t* b,
                                 int64_t b_stride, float* c, int64_t c_stride, int64_t depth,
                                 bool adds) {
  Floats sums[ROWS][VECTORS] = {};
  if (adds)
    for (int row = 0; row < ROWS; ++row)
      for (int i = 0; i < VECTORS; ++i) sums[row][i] = load(c + row * c_stride + i * LANES);
  for (int64_t k = 0; k < depth; ++k) {
    Words columns[VECTORS];
#pragma GCC unroll 4
    for (int i = 0; i < VECTORS; ++i) columns[i] = load(b + k * b_stride + i * LANES);
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 4
      for (int i = 0; i < VECTORS; ++i)
        sums[row][i] = multiply_add<PACKED>(sums[row][i], a[row * a_stride + k] + Words{}, columns[i]);
  }
  for (int row = 0; row < ROWS; ++row)
    for (int i = 0; i < VECTORS; ++i) store(c + row * c_stride + i * LANES, sums[row][i]);
}

template <int64_t PACKED, int ROWS>
static void product_rows(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride,
                         float* c, int64_t c_stride, int64_t depth, int64_t columns, bool adds) {
  constexpr int WIDE = ROWS * 4 <= 2 * MAX_ROWS ? 4 : 2;
  int64_t i = 0;
  for (; i + WIDE * LANES <= columns; i += WIDE * LANES)
    product_block<PACKED, ROWS, WIDE>(a, a_stride, b + i, b_stride, c + i, c_stride, depth, adds);
  for (; i < columns; i += LANES)
    product_block<PACKED, ROWS, 1>(a, a_stride, b + i, b_stride, c + i, c_stride, depth, adds);
}

// columns: a multiple of LANES. rows: at most MAX_ROWS.
template <int64_t PACKED, int ROWS = MAX_ROWS>
static inline void product(int64_t rows, const uint32_t* a, int64_t a_stride, const uint32_t* b,
                           int64_t b_stride, float* c, int64_t c_stride, int64_t depth,
                           int64_t columns, bool adds) {
  if (rows == ROWS)
    return product_rows<PACKED, ROWS>(a, a_stride, b, b_stride, c, c_stride, depth, columns, adds);
  if constexpr (ROWS > 1)
    product<PACKED, ROWS - 1>(rows, a, a_stride, b, b_stride, c, c_stride, depth, columns, adds);
}

// Queries whose products with a block of keys are in memory at once.
template <class T>
constexpr int64_t PRODUCT_ROWS = multiplies_tiles<T> ? 2 * TILE : MAX_ROWS;

// The same for memory of whole tiles: rows and depth are rounded up.
template <class T, bool ADDS>
static inline void product_in_tiles(int64_t rows, const uint32_t* a, int64_t a_stride,
                                    const uint32_t* b, int64_t b_stride, float* c,
                                    int64_t c_stride, int64_t depth, int64_t columns) {
#if HAS_AMX
  if constexpr (multiplies_tiles<T>) {
    const auto multiply = rows > TILE ? product_of_tiles<2, ADDS> : product_of_tiles<1, ADDS>;
    multiply(a, a_stride, b, b_stride, c, c_stride, round_up(depth, TILE), columns);
  }
#endif
}

// LANES words of a vector of `size` elements from element `start` on; zeros beyond it.
template <class T>
static inline Words load_words(const T* vector, int64_t start, int64_t size) {
  if constexpr (PACK<T> == 1) return (Words)load_part(vector + start, size - start);
  Words words{};
  if (size - start >= 2 * LANES)
    memcpy(&words, vector + start, sizeof words);
  else
    memcpy(&words, vector + start, (size - start) * sizeof(T));
  return words;
}

// (num_keys, size) -> out (words, BLOCK_KEYS), transposed, for num_keys rounded up to LANES.
// next: (num_keys,) addresses of the vectors to prefetch, which are packed after these.
template <class T>
static void pack_keys(const T* const* keys, const T* const* next, int64_t num_keys, int64_t size,
                      uint32_t* out) {
  for (int64_t first = 0; first < num_keys; first += LANES)
    for (int64_t start = 0; start < size; start += LANES * PACK<T>) {
      Words square[LANES];
      for (int64_t i = 0; i < LANES; ++i) {
        if (first + i >= num_keys) {
          square[i] = Words{};
          continue;
        }
        square[i] = load_words(keys[first + i], start, size);
        prefetch(next[first + i] + start);
      }
      transpose(square);
      for (int64_t i = 0; i < LANES; ++i)
        store(out + (start / PACK<T> + i) * BLOCK_KEYS + first, square[i]);
    }
}

// (num_keys, size) -> out (num_keys / PACK, width): with pairs, those of neighbouring keys.
template <class T>
static void pack_values(const T* const* values, const T* const* next, int64_t num_keys,
                        int64_t size, int64_t width, uint32_t* out) {
  for (int64_t key = 0; key < num_keys; key += PACK<T>, out += width)
    for (int64_t i = 0; i < size; i += LANES) {
      Words words = (Words)load_part(values[key] + i, size - i);
      prefetch(next[key] + i);
      if constexpr (PACK<T> == 2) {
        words >>= 16;
        if (key + 1 < num_keys) words |= (Words)load_part(values[key + 1] + i, size - i);
        prefetch(next[key + 1] + i);
      }
      store(out + i, words);
    }
}

// For few rows, such as a decode's, packing does not pay: these two read keys and values in place.
constexpr int64_t FEW_ROWS = 4;

template <class T>
constexpr int64_t LINE = LANES * PACK<T>;  // elements of a vector of words

// scores (columns,) of one query (size / PACK words) and the keys; size is a multiple of LINE.
template <class T>
static void score_in_place(const uint32_t* query, const T* const* keys, const T* const* next,
                           int64_t columns, int64_t size, float* scores) {
  for (int64_t first = 0; first < columns; first += LANES) {
    Floats sums[LANES] = {};
    for (int64_t start = 0; start < size; start += LINE<T>) {
      const Words words = load(query + start / PACK<T>);
#pragma GCC unroll 16
      for (int i = 0; i < LANES; ++i) {
        sums[i] = multiply_add<PACK<T>>(sums[i], words, load_words(keys[first + i], start, size));
        prefetch(next[first + i] + start);
      }
    }
    store(scores + first, sum_each(sums));
  }
}

// With AMX, few queries are the columns of a tile, and the lines of 16 keys in the cache are the rows of
// another one. tile: (words, TILE), the queries of a head with others that are never read.
template <class T>
static void load_query_tile(const uint32_t* queries, int64_t rows, int64_t width, int64_t words,
                            uint32_t* tile) {
  for (int64_t k = 0; k < words; ++k)
    for (int64_t row = 0; row < rows; ++row) tile[k * TILE + row] = queries[row * width + k];
}

// scores (rows, columns) of at most FEW_ROWS queries and the keys; size is a multiple of LINE.
template <class T>
static void score_in_tiles(int64_t rows, const uint32_t* tile, const T* const* keys,
                           const T* const* next, int64_t columns, int64_t size, float* scores) {
#if HAS_AMX
  alignas(64) float products[TILE][TILE];  // of a key with each query
  alignas(64) T lines[TILE * MAX_HEAD_DIM];
  for (int64_t first = 0; first < columns; first += TILE) {
    const T* begin = keys[first];
    bool is_run = true;
    for (int64_t i = 1; i < TILE; ++i) is_run &= keys[first + i] == begin + i * size;
    if (!is_run) {
      for (int64_t i = 0; i < TILE; ++i)
        memcpy(lines + i * size, keys[first + i], size * sizeof(T));
      begin = lines;
    }
    _tile_zero(0);
    for (int64_t start = 0; start < size; start += LINE<T>) {
      _tile_loadd(4, begin + start, size * sizeof(T));
      _tile_loadd(6, tile + start / PACK<T> * TILE, TILE * sizeof(uint32_t));
      _tile_dpbf16ps(0, 4, 6);
    }
    _tile_stored(0, products, sizeof products[0]);
    for (int64_t i = 0; i < TILE; ++i)
      for (int64_t start = 0; start < size; start += LINE<T>) prefetch(next[first + i] + start);
    Words square[FEW_ROWS];
    for (int64_t i = 0; i < FEW_ROWS; ++i)
      for (int64_t group = 0; group < TILE / FEW_ROWS; ++group)
        memcpy((uint32_t*)&square[i] + group * FEW_ROWS, products[group * FEW_ROWS + i],
               FEW_ROWS * sizeof(float));
    transpose(square);
    for (int64_t row = 0; row < rows; ++row)
      store((uint32_t*)scores + row * BLOCK_KEYS + first, square[row]);
  }
#endif
}

// Interleaves the values of two keys for products with pairs of weights; in_order restores the order
// of the sums.
#if HAS_BF16_DOT
static inline void interleave(Words a, Words b, Words& low, Words& high) {
  low = (Words)_mm512_unpacklo_epi16((__m512i)a, (__m512i)b);
  high = (Words)_mm512_unpackhi_epi16((__m512i)a, (__m512i)b);
}

template <int START, int... I>
static inline Floats in_order(Floats low, Floats high, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(low, high, (I / 4 % 2 * 16 + START + I / 8 * 4 + I % 4)...);
}
#endif

// results (ROWS, size) += weights (ROWS, num_keys / PACK words) values; see score_in_place.
template <class T, int ROWS>
static void weigh_in_place(const uint32_t* weights, const T* const* values, const T* const* next,
                           int64_t num_keys, int64_t size, float* results, int64_t width) {
  for (int64_t start = 0; start < size; start += LINE<T>) {
    Floats sums[ROWS][PACK<T>] = {};
    for (int64_t key = 0; key < num_keys; key += PACK<T>) {
      Words pieces[PACK<T>];
      pieces[0] = load_words(values[key], start, size);
      prefetch(next[key] + start);
#if HAS_BF16_DOT
      if constexpr (PACK<T> == 2) {
        interleave(pieces[0], load_words(values[key + 1], start, size), pieces[0], pieces[1]);
        prefetch(next[key + 1] + start);
      }
#endif
#pragma GCC unroll 8
      for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 2
        for (int i = 0; i < PACK<T>; ++i)
          sums[row][i] = multiply_add<PACK<T>>(
              sums[row][i], weights[row * BLOCK_KEYS + key / PACK<T>] + Words{}, pieces[i]);
    }
    for (int row = 0; row < ROWS; ++row) {
      float* result = results + row * width + start;
#if HAS_BF16_DOT
      if constexpr (PACK<T> == 2) {
        const auto lanes = std::make_integer_sequence<int, LANES>{};
        const Floats low = sums[row][0], high = sums[row][1];
        store(result, load(result) + in_order<0>(low, high, lanes));
        store(result + LANES, load(result + LANES) + in_order<8>(low, high, lanes));
        continue;
      }
#endif
      store(result, load(result) + sums[row][0]);
    }
  }
}

template <class T, int ROWS = FEW_ROWS>
static inline void weigh_few(int64_t rows, const uint32_t* weights, const T* const* values,
                             const T* const* next, int64_t num_keys, int64_t size, float* results,
                             int64_t width) {
  if (rows == ROWS)
    return weigh_in_place<T, ROWS>(weights, values, next, num_keys, size, results, width);
  if constexpr (ROWS > 1)
    weigh_few<T, ROWS - 1>(rows, weights, values, next, num_keys, size, results, width);
}

// The running softmax of one row: its largest score, as an exponent of two, and the sum of its
// weights, one partial sum per lane.
struct RowState {
  Floats sums;
  float largest;
  int64_t first_key;  // first key that the row attends to
};
static_assert(sizeof(RowState) <= STATE_FLOATS * sizeof(float));

constexpr float LOG2_E = 1.44269504f;

// From products to scores as exponents of two: e^x = 2^(x log2 e). limit: soft cap; 0 is none.
struct Scaling {
  float scale, limit;

  Scaling(const AttentionStep& step, const AttentionLayer& layer) {
    scale = layer.key_scale * (step.softcap ? step.scale / step.softcap : step.scale * LOG2_E);
    limit = step.softcap * LOG2_E;
  }

  Floats operator()(Floats products) const {
    const Floats scaled = products * scale;
    return limit ? hyperbolic_tangent(scaled) * limit : scaled;
  }
};

// Turns one row's products into softmax weights; keys outside [first, end) get 0. Earlier sums are
// rescaled to the new largest score.
template <class T>
static void fold_in(const float* products, int64_t first, int64_t end, int64_t columns,
                    const Scaling& scaling, RowState& state, float* result, int64_t width,
                    uint32_t* weights) {
  Floats scaled[BLOCK_KEYS / LANES];
  Floats best = splat(-INFINITY);
  Ints lanes;
  for (int i = 0; i < LANES; ++i) lanes[i] = i;
  for (int64_t i = 0; i < columns; i += LANES) {
    Floats values = scaling(load(products + i));
    if (i + LANES > end) values = lanes < (int32_t)(end - i) ? values : splat(-INFINITY);
    if (i < first) values = lanes < (int32_t)(first - i) ? splat(-INFINITY) : values;
    scaled[i / LANES] = values;
    best = maximum(best, values);
  }
  const float old_largest = state.largest;
  const float new_largest = std::max(old_largest, largest(best));
  const float base = new_largest == -INFINITY ? 0.0f : new_largest;
  Floats total{};
  for (int64_t i = 0; i < columns; i += LANES) {
    Floats weight = power_of_two<PACK<T> == 2 ? 4 : 6>(scaled[i / LANES] - base);
    if constexpr (PACK<T> == 2) {
      Halves bits = to_halves(weight);
      memcpy((uint16_t*)weights + i, &bits, sizeof bits);
      total += from_halves(bits);
    } else {
      store((float*)weights + i, weight);
      total += weight;
    }
  }
  state.largest = new_largest;
  if (old_largest == new_largest) {
    state.sums += total;
    return;
  }
  const float shrink = power_of_two(splat(old_largest - base))[0];
  state.sums = state.sums * shrink + total;
  for (int64_t i = 0; i < width; i += LANES) store(result + i, load(result + i) * shrink);
}

// The working memory of a task; it fits the L2 cache.
struct Scratch {
  uint32_t *keys, *values, *queries;
  float* results;
  RowState* states;
  float *wide_keys, *wide_values;  // converted from Fp8

  Scratch(int64_t width, int64_t num_rows, float* memory) {
    keys = (uint32_t*)memory;
    values = keys + width * BLOCK_KEYS;
    queries = values + width * BLOCK_KEYS;
    results = (float*)queries + num_rows * width;
    states = (RowState*)(results + num_rows * width);
    wide_keys = (float*)states + num_rows * STATE_FLOATS;
    wide_values = wide_keys + width * BLOCK_KEYS;
  }
};

template <class T>
static void load_queries(const AttentionStep& step, const AttentionLayer& layer, const Task& task,
                         int64_t head, uint32_t* queries) {
  const int64_t group = step.num_heads / step.num_kv_heads, size = step.head_dim;
  const int64_t width = padded(size);
  for (int64_t token = 0; token < task.tile_tokens; ++token) {
    const T* line = (const T*)layer.q +
                    (task.sequence->first_token + task.tile_start + token) * layer.q_stride +
                    head * group * size;
    for (int64_t g = 0; g < group; ++g, line += size, queries += width)
      for (int64_t i = 0; i < size; i += LANES * PACK<T>)
        store(queries + i / PACK<T>, load_words(line, i, size));
  }
}

// The addresses of BLOCK_KEYS keys and values of a task, from key `first` on. Entries after its last
// key point to its first key. The cache holds elements of type C.
template <class C>
static void find_keys(const AttentionStep& step, const AttentionLayer& layer, const Task& task,
                      int64_t first, const C** keys, const C** values) {
  const int32_t* table = step.block_table + task.sequence->row * step.table_stride;
  const int64_t offset = task.first_head * step.head_stride, size = step.head_dim;
  const int64_t end = std::clamp<int64_t>(task.end_key - first, 0, BLOCK_KEYS);
  int64_t entry = first / step.block_size, inside = first % step.block_size;
  for (int64_t i = 0; i < end; ++entry, inside = 0) {
    int64_t place = table[entry] * step.block_stride + inside * size + offset;
    for (; i < end && inside < step.block_size; ++i, ++inside, place += size) {
      keys[i] = (const C*)layer.keys + place;
      values[i] = (const C*)layer.values + place;
    }
  }
  const int64_t place = table[task.first_key / step.block_size] * step.block_stride +
                        task.first_key % step.block_size * size + offset;
  std::fill(keys + end, keys + BLOCK_KEYS, (const C*)layer.keys + place);
  std::fill(values + end, values + BLOCK_KEYS, (const C*)layer.values + place);
}

// The vectors of one block of keys in the type of the computation, and the next ones to prefetch.
template <class T>
struct Vectors {
  const T *const *now, *const *next;

  void read(const T* const* found, const T* const* then, int64_t, int64_t, float*) {
    now = found;
    next = then;
  }

  // Converts Fp8 to T in `memory`, for num_keys rounded up to LANES, and prefetches the next block.
  void read(const Fp8* const* found, const Fp8* const* then, int64_t num_keys, int64_t size,
            float* memory) {
    for (int64_t i = 0; i < BLOCK_KEYS; ++i) {
      T* place = (T*)memory + i * size;
      places[i] = place;
      if (i >= round_up(num_keys, LANES)) continue;
      from_fp8(found[i], place, size);
      for (int64_t byte = 0; byte < size; byte += 64) prefetch(then[i] + byte);
    }
    now = next = places;
  }

 private:
  const T* places[BLOCK_KEYS];
};

// A sink is the first score of the first part of the context. head_rows: places of a head.
static void start_rows(const AttentionStep& step, const AttentionLayer& layer, const Task& task,
                       int64_t num_earlier, int64_t head_rows, RowState* states) {
  const int64_t group = step.num_heads / step.num_kv_heads;
  const bool is_first = task.first_key == step.reach.first_key(num_earlier);
  for (int64_t head = task.first_head; head < task.first_head + task.num_heads; ++head) {
    for (int64_t row = 0; row < task.tile_tokens * group; ++row) {
      const int64_t first_key = step.reach.first_key(num_earlier + row / group);
      if (is_first && layer.sinks)
        states[row] = {Floats{1.0f}, layer.sinks[head * group + row % group] * LOG2_E, first_key};
      else
        states[row] = {Floats{}, -INFINITY, first_key};
    }
    states += head_rows;
  }
}

// Stores the model's result if the task has the whole context, otherwise the partial for `merge`.
template <class T>
static void store_results(const AttentionStep& step, const AttentionLayer& layer, const Task& task,
                          int64_t head_rows, const Scratch& scratch) {
  const int64_t group = step.num_heads / step.num_kv_heads, size = step.head_dim;
  const int64_t width = padded(size), num_rows = task.tile_tokens * group;
  for (int64_t head = 0; head < task.num_heads; ++head)
    for (int64_t row = 0; row < num_rows; ++row) {
      const int64_t place = head * head_rows + row;
      const RowState& state = scratch.states[place];
      const float* result = scratch.results + place * width;
      if (task.partial) {
        float* to = step.workspace + task.partial +
                    ((task.first_head + head) * num_rows + row) * (width + 2);
        memcpy(to, result, width * sizeof(float));
        to[width] = state.largest;
        to[width + 1] = sum(state.sums);
        continue;
      }
      const int64_t token = task.sequence->first_token + task.tile_start + row / group;
      T* out = (T*)layer.out +
               (token * step.num_heads + (task.first_head + head) * group + row % group) * size;
      const float inverse = layer.value_scale / sum(state.sums);
      for (int64_t i = 0; i < size; i += LANES)
        store_part(out + i, load(result + i) * inverse, size - i);
    }
}

template <class T, class C>
static void attend(const AttentionStep& step, const AttentionLayer& layer, const Task& task,
                   float* memory) {
  const int64_t group = step.num_heads / step.num_kv_heads, size = step.head_dim;
  const int64_t width = padded(size);
  const int64_t num_rows = task.tile_tokens * group;
  const bool packs_values = num_rows > FEW_ROWS || size % LINE<T>;
  const bool uses_tiles = multiplies_tiles<T> && packs_values;
  const bool shares_keys = num_rows * 2 * LANES > size;  // else each row reads them again
  const bool is_in_place = sizeof(C) == sizeof(T);  // a tile waits for what was just converted
  const bool has_query_tile = multiplies_tiles<T> && is_in_place && shares_keys && !packs_values;
  const bool packs_keys = packs_values || (shares_keys && !has_query_tile);
  const int64_t head_rows = multiplies_tiles<T> ? round_up(num_rows, ROW_ALIGNMENT) : num_rows;
  const int64_t most_rows = uses_tiles ? PRODUCT_ROWS<T> : MAX_ROWS;
  const Scratch scratch(width, head_rows * task.num_heads, memory);
  const int64_t tile_place = FEW_ROWS * width, words = ceil_div(size, PACK<T>);
  for (int64_t head = 0; head < task.num_heads; ++head) {
    uint32_t* queries = scratch.queries + head * head_rows * width;
    load_queries<T>(step, layer, task, task.first_head + head, queries);
    if (has_query_tile) load_query_tile<T>(queries, num_rows, width, words, queries + tile_place);
    memset(scratch.results + head * head_rows * width, 0,
           (uses_tiles ? head_rows : num_rows) * width * sizeof(float));
  }
  const Sequence& sequence = *task.sequence;
  const int64_t num_earlier = sequence.num_keys - sequence.num_tokens + task.tile_start;
  start_rows(step, layer, task, num_earlier, head_rows, scratch.states);
#if HAS_AMX
  if (multiplies_tiles<T>) configure_tiles(TILE, TILE, TILE);
#endif
  const Scaling scaling(step, layer);
  const C *found_keys[BLOCK_KEYS], *found_values[BLOCK_KEYS];
  const C *next_keys[BLOCK_KEYS], *next_values[BLOCK_KEYS];
  Vectors<T> keys, values;
  find_keys(step, layer, task, task.first_key, next_keys, next_values);
  for (int64_t first = task.first_key; first < task.end_key; first += BLOCK_KEYS) {
    const int64_t num_keys = std::min(BLOCK_KEYS, task.end_key - first);
    for (int64_t head = 0; head < task.num_heads; ++head) {
      memcpy(found_keys, next_keys, sizeof found_keys);
      memcpy(found_values, next_values, sizeof found_values);
      if (head + 1 < task.num_heads)
        for (int64_t i = 0; i < BLOCK_KEYS; ++i)
          next_keys[i] += step.head_stride, next_values[i] += step.head_stride;
      else
        find_keys(step, layer, task, first + BLOCK_KEYS, next_keys, next_values);
      keys.read(found_keys, next_keys, num_keys, size, scratch.wide_keys);
      values.read(found_values, next_values, num_keys, size, scratch.wide_values);
      if (packs_keys) pack_keys(keys.now, keys.next, num_keys, size, scratch.keys);
      if (packs_values)
        pack_values(values.now, values.next, num_keys, size, width, scratch.values);
      if (uses_tiles) {
        const int64_t filled = ceil_div(num_keys, PACK<T>);
        memset(scratch.values + filled * width, 0,
               (round_up(filled, TILE) - filled) * width * sizeof(uint32_t));
      }
      for (int64_t row = 0; row < num_rows; row += most_rows) {
        const int64_t rows = std::min(most_rows, num_rows - row);
        const auto visible = [&](int64_t r) {  // number of keys of this block up to the row's token
          return std::min(num_keys, num_earlier + r / group + 1 - first);
        };
        const int64_t most = visible(row + rows - 1), place = head * head_rows + row;
        if (most <= 0 || scratch.states[place].first_key >= first + most) continue;
        const int64_t columns = round_up(most, LANES);
        alignas(64) float scores[PRODUCT_ROWS<T> * BLOCK_KEYS];
        alignas(64) uint32_t weights[PRODUCT_ROWS<T> * BLOCK_KEYS];
        const uint32_t* queries = scratch.queries + place * width;
        float* results = scratch.results + place * width;
        if (uses_tiles)
          product_in_tiles<T, false>(rows, queries, width, scratch.keys, BLOCK_KEYS, scores,
                                     BLOCK_KEYS, words, columns);
        else if (has_query_tile)
          score_in_tiles(rows, queries + tile_place, keys.now, keys.next, columns, size, scores);
        else if (packs_keys)
          product<PACK<T>>(rows, queries, width, scratch.keys, BLOCK_KEYS, scores, BLOCK_KEYS,
                           words, columns, false);
        else
          for (int64_t r = 0; r < rows; ++r)
            score_in_place(queries + r * width, keys.now, keys.next, columns, size,
                           scores + r * BLOCK_KEYS);
        for (int64_t r = 0; r < rows; ++r)
          fold_in<T>(scores + r * BLOCK_KEYS, scratch.states[place + r].first_key - first,
                     visible(row + r), columns, scaling, scratch.states[place + r],
                     results + r * width, width, weights + r * BLOCK_KEYS);
        if (uses_tiles && columns % (2 * TILE))
          for (int64_t r = 0; r < rows; ++r)
            memset(weights + r * BLOCK_KEYS + columns / 2, 0, TILE / 2 * sizeof(uint32_t));
        if (uses_tiles)
          product_in_tiles<T, true>(rows, weights, BLOCK_KEYS, scratch.values, width, results,
                                    width, ceil_div(most, PACK<T>), width);
        else if (packs_values)
          product<PACK<T>>(rows, weights, BLOCK_KEYS, scratch.values, width, results, width,
                           ceil_div(most, PACK<T>), width, true);
        else
          weigh_few(rows, weights, values.now, values.next, most, size, results, width);
      }
    }
  }
#if HAS_AMX
  if (multiplies_tiles<T>) _tile_release();
#endif
  store_results<T>(step, layer, task, head_rows, scratch);
}

// Merges the parts of one row in order of the context.
template <class T>
static void merge(const AttentionStep& step, const float* partial, int64_t part_stride,
                  int64_t num_parts, float value_scale, T* out) {
  const int64_t width = padded(step.head_dim);
  float best = -INFINITY, total = 0.0f;
  for (int64_t part = 0; part < num_parts; ++part)
    best = std::max(best, partial[part * part_stride + width]);
  Floats results[MAX_HEAD_DIM / LANES] = {};
  for (int64_t part = 0; part < num_parts; ++part) {
    const float* from = partial + part * part_stride;
    const float shrink = power_of_two(splat(from[width] - best))[0];
    total += from[width + 1] * shrink;
    for (int64_t i = 0; i < width; i += LANES) results[i / LANES] += load(from + i) * shrink;
  }
  for (int64_t i = 0; i < step.head_dim; i += LANES)
    store_part(out + i, results[i / LANES] * (value_scale / total), step.head_dim - i);
}

template <class T, class C>
static void write_cache(const AttentionStep& step, const AttentionLayer& layer, int64_t token) {
  const int64_t slot = step.slots[token];
  if (slot < 0) return;
  const int64_t place = slot / step.block_size * step.block_stride +
                        slot % step.block_size * step.head_dim;
  const int64_t size = step.head_dim;
  const T* k = (const T*)layer.k + token * layer.k_stride;
  const T* v = (const T*)layer.v + token * layer.v_stride;
  C *keys = (C*)layer.keys + place, *values = (C*)layer.values + place;
  for (int64_t head = 0; head < step.num_kv_heads; ++head) {
    if constexpr (sizeof(C) == 1) {
      to_fp8(k, keys, size, layer.key_scale);
      to_fp8(v, values, size, layer.value_scale);
    } else {
      memcpy(keys, k, size * sizeof(T));
      memcpy(values, v, size * sizeof(T));
    }
    k += size, v += size, keys += step.head_stride, values += step.head_stride;
  }
}

template <class T, class C>
static void attend_in_team(const AttentionStep& step, const AttentionLayer& layer) {
  const int64_t width = padded(step.head_dim);
  const int64_t group = step.num_heads / step.num_kv_heads;
  const int64_t num_tasks = step.plans[step.num_seqs].first_task;
#pragma omp for nowait
  for (int64_t token = 0; token < step.num_tokens; ++token) write_cache<T, C>(step, layer, token);
  wait_for_team();
  float* memory = step.workspace + omp_get_thread_num() * step.scratch_floats;
#pragma omp for schedule(dynamic) nowait
  for (int64_t number = num_tasks - 1; number >= 0; --number)  // chunks, the longer tasks, first
    attend<T, C>(step, layer, make_task(step, number), memory);
  wait_for_team();
#pragma omp for schedule(dynamic) nowait
  for (int64_t s = 0; s < step.num_seqs; ++s) {
    const SequencePlan& plan = step.plans[s];
    if (plan.num_parts == 1) continue;
    const int64_t num_rows = step.sequences[s].num_tokens * group;
    for (int64_t head = 0; head < step.num_kv_heads; ++head)
      for (int64_t row = 0; row < num_rows; ++row) {
        const int64_t token = step.sequences[s].first_token + row / group;
        merge(step,
              step.workspace + plan.first_partial + (head * num_rows + row) * (width + 2),
              step.num_kv_heads * num_rows * (width + 2), plan.num_parts, layer.value_scale,
              (T*)layer.out +
                  (token * step.num_heads + head * group + row % group) * step.head_dim);
      }
  }
}

template <class T>
static void paged_attention_in_team(const AttentionStep& step, const AttentionLayer& layer) {
  if (step.is_fp8) return attend_in_team<T, Fp8>(step, layer);
  attend_in_team<T, T>(step, layer);
}

template <class T>
static void paged_attention(const AttentionStep& step, const AttentionLayer& layer) {
  run_in_team(step.threads, [&] { paged_attention_in_team<T>(step, layer); });
}
