// Products of quantised weights with inputs that are rounded to integers of eight bits.
//
// A block of inputs is its largest magnitude / 127 times BLOCK integers, so the product of a block is
// a sum of integers, which is exact, times both scales. A row's result does not depend on the other
// rows.

// Words of four numbers, in the order in which codes come apart: of codes below eight bits, a word of
// eight is those of the inputs 0, 2, 4, 6 and those of 1, 3, 5, 7. sums: of all numbers or, where the
// weights have scales for both halves, of those of each, times the scale.
struct RoundedBlock {
  uint32_t words[BLOCK / 4];
  float scale, sums[2];
};

constexpr int64_t ROUNDED_ROWS = 96;  // rows that stay in the cache while panels are read

template <class F, class T>
static inline void round_block(const T* x, RoundedBlock& block) {
  constexpr bool IN_TURNS = F::BITS != 8;
  constexpr float SHIFTER = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  Floats size{}, non_finite{};
  for (int64_t i = 0; i < BLOCK; i += LANES) {
    const Floats values = load(x + i);
    size = maximum(size, (Floats)((Words)values & 0x7fffffff));
    non_finite += values * 0.0f;  // NaN spoils the block, as it does in a product
  }
  const float most = largest(size), factor = most > 0 ? 127 / most : 0;
  int32_t numbers[BLOCK], sums[2] = {};
  for (int64_t i = 0; i < BLOCK; i += LANES) {
    const Floats shifted = not_fused(load(x + i) * factor) + SHIFTER;
    const Ints rounded = (Ints)shifted - (Ints)splat(SHIFTER);
    memcpy(numbers + i, &rounded, sizeof rounded);
  }
  for (int64_t i = 0; i < BLOCK; ++i) sums[F::HALVES * i / BLOCK] += numbers[i];
  for (int64_t word = 0; word < BLOCK / 4; ++word) {
    const int32_t* from = numbers + (IN_TURNS ? word / 2 * 8 + word % 2 : word * 4);
    constexpr int STEP = IN_TURNS ? 2 : 1;
    block.words[word] = uint32_t(from[0] & 255) | uint32_t(from[STEP] & 255) << 8 |
                        uint32_t(from[2 * STEP] & 255) << 16 | uint32_t(from[3 * STEP]) << 24;
  }
  block.scale = most / 127 + sum(non_finite);
  for (int half = 0; half < 2; ++half) block.sums[half] = float(sums[half]) * block.scale;
}

// A row of x, as blocks that begin at `to`; it may be the row itself.
template <class T>
static inline void round_row(const T* x, int64_t size, Packing packing, T* to) {
  static_assert(sizeof(RoundedBlock) <= BLOCK * sizeof(T));
  with_form(packing, [&](auto form) {
    for (int64_t k = 0; k < size / BLOCK; ++k) {
      RoundedBlock block;
      round_block<decltype(form)>(x + k * BLOCK, block);
      memcpy((uint8_t*)to + k * sizeof block, &block, sizeof block);
    }
  });
}

// Adds to each lane the products of four codes of `BITS` bits, bytes without sign, and four numbers.
template <int BITS>
static inline Ints multiply_bytes(Ints sums, Words codes, Words numbers) {
#if HAS_VNNI
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, (__m512i)numbers);
#elif LANES >= 8
#if LANES == 16
  const auto products = [&](Words bytes) {  // pairs of codes of 7 bits do not overflow 16 bits
    const __m512i pairs = _mm512_maddubs_epi16((__m512i)bytes, (__m512i)numbers);
    return (Ints)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
  };
#else
  const auto products = [&](Words bytes) {
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)bytes, (__m256i)numbers);
    return (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  };
#endif
  if constexpr (BITS < 8) return sums + products(codes);
  return sums + products(codes & 0x7f7f7f7f) + (products(codes >> 7 & 0x01010101) << 7);
#else
  for (int n = 0; n < 4; ++n)
    sums += (Ints)(codes >> 8 * n & 255) * ((Ints)(numbers << (24 - 8 * n)) >> 24);
  return sums;
#endif
}

// The bytes of a table at indices below 16.
static inline Words look_up_bytes(const uint8_t (&table)[16], Words indices) {
#if LANES == 16
  const __m128i line = _mm_loadu_si128((const __m128i*)table);
  return (Words)_mm512_shuffle_epi8(_mm512_maskz_broadcast_i32x4(0xffff, line), (__m512i)indices);
#elif LANES == 8
  const __m128i line = _mm_loadu_si128((const __m128i*)table);
  return (Words)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(line), (__m256i)indices);
#else
  uint8_t bytes[4 * LANES];
  memcpy(bytes, &indices, sizeof bytes);
  for (auto& byte : bytes) byte = table[byte];
  return load((const uint32_t*)bytes);
#endif
}

constexpr uint8_t FP4_BYTES[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
constexpr float FP4_ZERO = 12;  // a byte is twice the value, and this

// Calls emit(i, n, codes) for word n of a RoundedBlock and each i of VECTORS: four codes of LANES outputs.
template <class F, class Emit>
INLINE static inline void unpack_codes(const uint8_t* record, int64_t block, const Emit& emit) {
  const auto* codes = (const uint32_t*)(record + F::HEADER_BYTES + block * F::BLOCK_BYTES);
  const auto* upper = codes + PANEL * BLOCK / 8;
  constexpr int PER_WORD = F::BITS == 8 ? 4 : 8, EXTRA = F::EXTRA;
#pragma GCC unroll UNROLL
  for (int word = 0; word < BLOCK / PER_WORD; ++word) {
#pragma GCC unroll UNROLL
    for (int i = 0; i < VECTORS; ++i) {
      const Words packed = load(codes + word * PANEL + i * LANES);
      if constexpr (F::BITS == 8) {
        emit(i, word, packed);
        continue;
      }
      Words low = packed & 0x0f0f0f0f, high = packed >> 4 & 0x0f0f0f0f;
      if constexpr (EXTRA > 0) {
        constexpr uint32_t mask = ((1u << EXTRA) - 1) * 0x10101010u;
        const Words rest = load(upper + word * EXTRA / 4 * PANEL + i * LANES);
        const int shift = F::upper_shift(word, 0), next = shift + EXTRA;
        low |= (shift < 4 ? rest << (4 - shift) : rest >> (shift - 4)) & mask;
        high |= (next < 4 ? rest << (4 - next) : rest >> (next - 4)) & mask;
      }
      if constexpr (F::TABLE) {
        low = look_up_bytes(FP4_BYTES, low);
        high = look_up_bytes(FP4_BYTES, high);
      }
      emit(i, 2 * word, low);
      emit(i, 2 * word + 1, high);
    }
  }
}

// The scales with which a value is code * scale + offset, for codes of `unpack_codes`.
template <class F>
INLINE static inline BlockScales scales_of_codes(const RecordScales& of_record,
                                                 const uint8_t* record, int64_t block,
                                                 int64_t lane) {
  BlockScales scales = block_scales<F>(of_record, record, block, lane);
  for (int half = 0; half < 2; ++half) {
    Floats &scale = scales.scale[half], &offset = scales.offset[half];
    if constexpr (F::SCALES == Scales::GROUP) offset = not_fused(-offset * scale);
    if constexpr (F::TABLE) {
      scale *= 0.5f;
      offset = scale * -FP4_ZERO;
    }
  }
  return scales;
}

// a * b + c, rounded once if the processor can.
static inline Floats fused(Floats a, Floats b, Floats c) {
#if LANES == 16
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LANES == 8
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// Adds the products of a block, or of one half of it, of one row. dots: the sums of integers.
template <class F>
INLINE static inline void add_dots(const Ints (&dots)[VECTORS], const BlockScales (&scales)[VECTORS],
                                   int half, const RoundedBlock& x, Floats (&sums)[VECTORS]) {
  const float total = x.sums[half];
#pragma GCC unroll 8
  for (int i = 0; i < VECTORS; ++i) {
    const Floats dot = __builtin_convertvector(dots[i], Floats);
    const Floats scale = not_fused(scales[i].scale[half] * x.scale);
    sums[i] = fused(dot, scale, fused(scales[i].offset[half], splat(total), sums[i]));
  }
}

template <class F>
INLINE static inline void load_code_scales(const RecordScales (&of_record)[VECTORS],
                                           const uint8_t* record, int64_t block,
                                           BlockScales (&scales)[VECTORS]) {
#pragma GCC unroll 8
  for (int i = 0; i < VECTORS; ++i)
    scales[i] = scales_of_codes<F>(of_record[i], record, block, i * LANES);
}

// A matrix's panel, and rows of RoundedBlock, `x_bytes` apart.
struct RoundedProduct {
  const uint8_t* record;
  int64_t blocks, size;  // blocks of a record; inputs
  const uint8_t* x;
  int64_t x_bytes;

  const RoundedBlock& block(int64_t row, int64_t number) const {
    return *(const RoundedBlock*)(x + row * x_bytes + number * sizeof(RoundedBlock));
  }
};

// Adds to the sums of ROWS rows from `first` on.
template <class F, int ROWS>
__attribute__((noinline)) static void multiply_rounded_tile(const RoundedProduct& product,
                                                            int64_t first,
                                                            Floats (*sums)[VECTORS]) {
  const uint8_t* record = product.record;
  RecordScales of_record[VECTORS];
  for (int64_t number = 0; number < product.size / BLOCK; record += F::record_bytes(product.blocks)) {
    load_scales<F>(record, of_record);
    for (int64_t block = 0; block < product.blocks; ++block, ++number) {
      fetch_ahead<F>(record, block);
      BlockScales scales[VECTORS];
      load_code_scales<F>(of_record, record, block, scales);
      Ints dots[ROWS][VECTORS] = {};
      const auto add = [&](int half) INLINE {
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; ++row) {
          add_dots<F>(dots[row], scales, half, product.block(first + row, number), sums[first + row]);
          for (int i = 0; i < VECTORS; ++i) dots[row][i] = Ints{};
        }
      };
      unpack_codes<F>(record, block, [&](int i, int n, Words codes) INLINE {
        if (F::HALVES == 2 && n == BLOCK / 8 && i == 0) add(0);
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; ++row) {
          const Words numbers = product.block(first + row, number).words[n] + Words{};
          dots[row][i] = multiply_bytes<F::BITS>(dots[row][i], codes, numbers);
        }
      });
      add(F::HALVES - 1);
    }
  }
}

template <class F>
static inline void multiply_rounded(const RoundedProduct& product, int64_t num_rows,
                                    Floats (*sums)[VECTORS]) {
  int64_t row = 0;
  if constexpr (LANES == 16) {
    for (; row + 8 <= num_rows; row += 8) multiply_rounded_tile<F, 8>(product, row, sums);
    for (; row + 4 <= num_rows; row += 4) multiply_rounded_tile<F, 4>(product, row, sums);
  }
  for (; row < num_rows; ++row) multiply_rounded_tile<F, 1>(product, row, sums);
}
