// Conversion of lines of keys and values to and from float8_e4m3fn.

// to[i] = from[i] / scale
template <class T>
static void to_fp8(const T* from, Fp8* to, int64_t size, float scale) {
  const float inverse = 1.0f / scale;
  for (int64_t i = 0; i < size; i += LANES)
    store_part(to + i, load_part(from + i, size - i) * inverse, size - i);
}

template <class T>
static inline void from_fp8(const Fp8* from, T* to, int64_t size) {
  for (int64_t i = 0; i < size; i += LANES)
    store_part(to + i, load_part(from + i, size - i), size - i);
}

#if LANES == 16
// The bfloat16 value of every code without its sign.
struct Fp8Table {
  uint16_t bits[128] = {};

  constexpr Fp8Table() {
    for (int code = 8; code < 127; ++code) bits[code] = uint16_t((code << 4) + (120 << 7));
    for (int code = 1; code < 8; ++code) {
      const int exponent = code < 2 ? 0 : code < 4 ? 1 : 2;  // of the leading one
      bits[code] = uint16_t(((118 + exponent) << 7) + ((code << (7 - exponent)) & 0x7f));
    }
    bits[127] = 0x7fc0;
  }
};
alignas(64) static constexpr Fp8Table FP8_TABLE;

static inline void from_fp8(const Fp8* from, BFloat16* to, int64_t size) {
  const __m512i* table = (const __m512i*)FP8_TABLE.bits;
  for (int64_t i = 0; i < size; i += 2 * LANES) {
    const __mmask32 lanes = size - i < 32 ? (1u << (size - i)) - 1 : 0xffffffffu;
    const __m512i codes = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(lanes, from + i));
    const __m512i low = _mm512_permutex2var_epi16(table[0], codes, table[1]);
    const __m512i high = _mm512_permutex2var_epi16(table[2], codes, table[3]);
    const __mmask32 is_high = _mm512_test_epi16_mask(codes, _mm512_set1_epi16(0x40));
    const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(codes, _mm512_set1_epi16(0x80)), 8);
    const __m512i values = _mm512_or_si512(_mm512_mask_blend_epi16(is_high, low, high), sign);
    _mm512_mask_storeu_epi16(to + i, lanes, values);
  }
}
#endif
