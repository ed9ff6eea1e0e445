// y = x W^T + b, with matrices packed in panels of PANEL outputs.
//
// A panel is (depth, PANEL) words. A word is one weight of an output or, in bfloat16, the weights of
// two consecutive inputs. MAX_TILE rows are multiplied by a panel at once. Every sum is in order of
// the inputs, so a row's result does not depend on the other rows.

constexpr int64_t PANEL = 32;
constexpr int VECTORS = PANEL / LANES;
constexpr int64_t MAX_TILE = LANES == 16 ? 12 : LANES == 8 ? 3 : 1;  // sums that fill the registers
constexpr int64_t BLOCK_ROWS = 192;  // rows that stay in the cache while all panels are read

template <class T>
constexpr bool MULTIPLIES = HAS_BF16_DOT || sizeof(T) == 4;

// Not inlined, because the loop needs all registers.
template <class T, int ROWS>
__attribute__((noinline)) static void multiply_panel(const uint32_t* x, int64_t x_stride,
                                                     const uint32_t* panel, int64_t depth,
                                                     Floats (*out)[VECTORS]) {
  Floats sums[ROWS][VECTORS] = {};
  for (int64_t k = 0; k < depth; ++k) {
    Words weights[VECTORS];
#pragma GCC unroll 8
    for (int i = 0; i < VECTORS; ++i) weights[i] = load(panel + k * PANEL + i * LANES);
#pragma GCC unroll 12
    for (int row = 0; row < ROWS; ++row) {
      const Words inputs = x[row * x_stride + k] + Words{};
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
static inline void multiply_tile(int64_t rows, const uint32_t* x, int64_t x_stride,
                                 const uint32_t* panel, int64_t depth, Floats (*out)[VECTORS]) {
  if (rows == ROWS) return multiply_panel<T, ROWS>(x, x_stride, panel, depth, out);
  if constexpr (ROWS > 1) multiply_tile<T, ROWS - 1>(rows, x, x_stride, panel, depth, out);
}

// Rows [first, end) of x, `x_stride` words apart. finish(row, sums) gets the VECTORS sums of a row.
template <class T, class Finish>
static inline void multiply_rows(int64_t first, int64_t end, const uint32_t* x, int64_t x_stride,
                                 const uint32_t* panel, int64_t depth, const Finish& finish) {
  const int64_t num_rows = end - first, num_tiles = ceil_div(num_rows, MAX_TILE);
  for (int64_t tile = 0; tile < num_tiles; ++tile) {  // of almost equal size
    const int64_t begin = first + tile * num_rows / num_tiles;
    const int64_t count = first + (tile + 1) * num_rows / num_tiles - begin;
    Floats sums[MAX_TILE][VECTORS];
    multiply_tile<T>(count, x + begin * x_stride, x_stride, panel, depth, sums);
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

#if HAS_BF16_DOT
static void linear_in_team(const Linear& call) {
  const int64_t num_panels = ceil_div(call.out_features, PANEL), depth = call.in_features / 2;
  const int64_t num_blocks = ceil_div(call.num_rows, BLOCK_ROWS), size = call.out_features;
#pragma omp for collapse(2)
  for (int64_t block = 0; block < num_blocks; ++block)
    for (int64_t p = 0; p < num_panels; ++p) {
      Floats bias[VECTORS];
      load_columns((const BFloat16*)call.bias, p * PANEL, size, bias);
      multiply_rows<BFloat16>(
          block * call.num_rows / num_blocks, (block + 1) * call.num_rows / num_blocks,
          (const uint32_t*)call.x, call.x_stride / 2,
          (const uint32_t*)call.panels + p * depth * PANEL, depth,
          [&](int64_t row, const Floats* sums) {
            store_columns((BFloat16*)call.out + row * size, p * PANEL, size, sums, bias);
          });
    }
}

static void linear(const Linear& call) {
#pragma omp parallel num_threads(call.threads) if (call.threads > 1)
  linear_in_team(call);
}
#endif
