// Products of pairs of bfloat16 in the tiles of AMX.

template <class T>
constexpr bool multiplies_tiles = HAS_AMX && sizeof(T) == 2;

constexpr int64_t TILE = 16;  // rows of a tile, and words of one

#if HAS_AMX
// Two tiles of rows, 4 and 5, times two tiles of columns, 6 and 7, added to sums in tiles 0 to 3. A step
// is `words` of depth.
static void configure_tiles(int64_t first_rows, int64_t second_rows, int64_t words) {
  struct {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  const int64_t num_rows[2] = {first_rows, second_rows};
  for (int i = 0; i < 2; ++i) {
    config.rows[2 * i] = config.rows[2 * i + 1] = config.rows[4 + i] = num_rows[i];
    config.row_bytes[2 * i] = config.row_bytes[2 * i + 1] = 64;
    config.row_bytes[4 + i] = 4 * words;
    config.rows[6 + i] = words;
    config.row_bytes[6 + i] = 64;
  }
  asm volatile("" : : "r"(&config) : "memory");  // GCC 12 believes that only 8 bytes are read
  _tile_loadconfig(&config);
}

// c (TILES * TILE, columns) = a (TILES * TILE, depth) b (depth, columns), added to c or not. columns,
// depth: multiples of TILE; strides in elements. The tiles are configured as whole ones.
template <int TILES, bool ADDS>
static inline void product_of_tiles(const uint32_t* a, int64_t a_stride, const uint32_t* b,
                                    int64_t b_stride, float* c, int64_t c_stride, int64_t depth,
                                    int64_t columns) {
  const int64_t a_bytes = 4 * a_stride, b_bytes = 4 * b_stride, c_bytes = 4 * c_stride;
  const uint32_t* other = a + TILE * a_stride;
  for (int64_t column = 0; column < columns; column += 2 * TILE) {
    float *first = c + column, *second = first + TILE * c_stride;
    const bool is_wide = column + TILE < columns;
    if (ADDS) {
      _tile_loadd(0, first, c_bytes);
      if (is_wide) _tile_loadd(1, first + TILE, c_bytes);
      if (TILES == 2) {
        _tile_loadd(2, second, c_bytes);
        if (is_wide) _tile_loadd(3, second + TILE, c_bytes);
      }
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int64_t k = 0; k < depth; k += TILE) {
      _tile_loadd(6, b + k * b_stride + column, b_bytes);
      _tile_loadd(4, a + k, a_bytes);
      _tile_dpbf16ps(0, 4, 6);
      if (TILES == 2) {
        _tile_loadd(5, other + k, a_bytes);
        _tile_dpbf16ps(2, 5, 6);
      }
      if (!is_wide) continue;
      _tile_loadd(7, b + k * b_stride + column + TILE, b_bytes);
      _tile_dpbf16ps(1, 4, 7);
      if (TILES == 2) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, first, c_bytes);
    if (is_wide) _tile_stored(1, first + TILE, c_bytes);
    if (TILES == 2) {
      _tile_stored(2, second, c_bytes);
      if (is_wide) _tile_stored(3, second + TILE, c_bytes);
    }
  }
}
#endif
