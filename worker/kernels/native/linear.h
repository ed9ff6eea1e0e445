// y = x W^T + b, of a matrix packed in panels of PANEL outputs.
//
// A panel is (in_features / 2, PANEL) words, each the weights of one output and two neighbouring
// inputs. MAX_TILE rows are multiplied by a panel at once. Every sum is in order of the inputs, so a
// row's result does not depend on the rows beside it.

#if HAS_BF16_DOT
constexpr int64_t PANEL = 2 * LANES;
constexpr int64_t MAX_TILE = 12;  // two accumulators each; with the panel's, that fills the registers
constexpr int64_t BLOCK_ROWS = 16 * MAX_TILE;  // that meet all panels while they are in the cache

template <int ROWS>
static void multiply_panel(const uint32_t* x, int64_t x_stride, const uint32_t* panel,
                           int64_t depth, Floats bias[2], BFloat16* out, int64_t out_stride,
                           int64_t columns) {
  Floats sums[ROWS][2] = {};
  for (int64_t k = 0; k < depth; ++k) {
    const Words low = load(panel + k * PANEL), high = load(panel + k * PANEL + LANES);
#pragma GCC unroll 12
    for (int row = 0; row < ROWS; ++row) {
      const Words pair = x[row * x_stride + k] + Words{};
      sums[row][0] = multiply_add<2>(sums[row][0], pair, low);
      sums[row][1] = multiply_add<2>(sums[row][1], pair, high);
    }
  }
  for (int row = 0; row < ROWS; ++row) {
    store_part(out + row * out_stride, sums[row][0] + bias[0], columns);
    if (columns > LANES)
      store_part(out + row * out_stride + LANES, sums[row][1] + bias[1], columns - LANES);
  }
}

template <int ROWS = MAX_TILE>
static inline void multiply_tile(int64_t rows, const uint32_t* x, int64_t x_stride,
                                 const uint32_t* panel, int64_t depth, Floats bias[2],
                                 BFloat16* out, int64_t out_stride, int64_t columns) {
  if (rows == ROWS)
    return multiply_panel<ROWS>(x, x_stride, panel, depth, bias, out, out_stride, columns);
  if constexpr (ROWS > 1)
    multiply_tile<ROWS - 1>(rows, x, x_stride, panel, depth, bias, out, out_stride, columns);
}

static void linear_in_team(const Linear& call) {
  const int64_t num_panels = ceil_div(call.out_features, PANEL), depth = call.in_features / 2;
  const int64_t num_blocks = ceil_div(call.num_rows, BLOCK_ROWS);
#pragma omp for collapse(2)
  for (int64_t block = 0; block < num_blocks; ++block)
    for (int64_t p = 0; p < num_panels; ++p) {
      const int64_t column = p * PANEL, columns = std::min(PANEL, call.out_features - column);
      const uint32_t* panel = (const uint32_t*)call.panels + p * depth * PANEL;
      Floats bias[2] = {};
      if (call.bias) {
        bias[0] = load_part((const BFloat16*)call.bias + column, columns);
        if (columns > LANES)
          bias[1] = load_part((const BFloat16*)call.bias + column + LANES, columns - LANES);
      }
      const int64_t first = block * call.num_rows / num_blocks;
      const int64_t num_rows = (block + 1) * call.num_rows / num_blocks - first;
      const int64_t num_tiles = ceil_div(num_rows, MAX_TILE);
      for (int64_t tile = 0; tile < num_tiles; ++tile) {  // as equal as can be
        const int64_t begin = first + tile * num_rows / num_tiles;
        const int64_t end = first + (tile + 1) * num_rows / num_tiles;
        multiply_tile(end - begin, (const uint32_t*)call.x + begin * call.x_stride / 2,
                      call.x_stride / 2, panel, depth, bias,
                      (BFloat16*)call.out + begin * call.out_features + column,
                      call.out_features, columns);
      }
    }
}

static void linear(const Linear& call) {
#pragma omp parallel num_threads(call.threads) if (call.threads > 1)
  linear_in_team(call);
}
#endif
