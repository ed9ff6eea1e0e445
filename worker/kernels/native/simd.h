// Vectors of LANES floats, and operations on them. library.cpp includes it once per instruction set,
// inside its namespace, with LANES and HAS_BF16_DOT set; so there is no include guard.

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));

static inline Floats splat(float value) { return value - Floats{}; }

static inline Floats maximum(Floats a, Floats b) { return b > a ? b : a; }  // a NaN in b is dropped

static inline Words widen(Halves bits) {
#if LANES == 16  // GCC needs twice the instructions for the general form
  return (Words)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)bits);
#else
  return __builtin_convertvector(bits, Words);
#endif
}

static inline Words widen(Bytes bytes) {
#if LANES == 16  // GCC converts the general form lane by lane
  return (Words)_mm512_maskz_cvtepu8_epi32(0xffff, (__m128i)bytes);
#elif LANES == 8
  return (Words)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)bytes));
#else
  return __builtin_convertvector(bytes, Words);
#endif
}

static inline Floats from_halves(Halves bits) { return (Floats)(widen(bits) << 16); }

// To bfloat16, rounded to nearest, ties to even; NaN stays NaN.
static inline Halves to_halves(Floats values) {
#if HAS_BF16_DOT
  return (Halves)_mm512_cvtneps_pbh((__m512)values);
#else
  Words bits = (Words)values;
  Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return __builtin_convertvector(values == values ? rounded : (bits >> 16) | 0x40, Halves);
#endif
}

template <class Line, int... I>
static inline Line in_turns(Line a, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, a, (I / 2 + I % 2 * LANES)...);
}

// Words of two bfloat16: lane i has first[i] in its lower half.
static inline Words pair(Floats first, Floats second) {
#if HAS_BF16_DOT
  typedef uint16_t Line __attribute__((vector_size(4 * LANES)));
  const Line halves = (Line)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
  return (Words)in_turns(halves, std::make_integer_sequence<int, 2 * LANES>{});
#else
  return widen(to_halves(first)) | widen(to_halves(second)) << 16;
#endif
}

static inline Words load(const uint32_t* from) {
  Words words;
  memcpy(&words, from, sizeof words);
  return words;
}

static inline Floats load(const float* from) {
  Floats values;
  memcpy(&values, from, sizeof values);
  return values;
}

static inline Floats load(const BFloat16* from) {
  Halves bits;
  memcpy(&bits, from, sizeof bits);
  return from_halves(bits);
}

// float8_e4m3fn: a sign, four bits of exponent, three of mantissa. The largest number is 448, the
// smallest 2^-9. There is no infinity; NaN has all bits but the sign set.
static inline Floats load(const Fp8* from) {
  Bytes bytes;
  memcpy(&bytes, from, sizeof bytes);
  const Words bits = widen(bytes), size = bits & 0x7f;
  // A subnormal number gets a leading one, which is subtracted again.
  const Floats normal = (Floats)((size << 20) + (120u << 23));
  const Floats subnormal = (Floats)((size << 20) + (121u << 23)) - 0x1p-6f;
  Floats values = size < 8 ? subnormal : normal;
  values = size == 0x7f ? splat(NAN) : values;
  return (Floats)((Words)values | (bits & 0x80) << 24);
}

static inline void store(uint32_t* to, Words words) { memcpy(to, &words, sizeof words); }

static inline void store(float* to, Floats values) { memcpy(to, &values, sizeof values); }

static inline void store(BFloat16* to, Floats values) {
  Halves bits = to_halves(values);
  memcpy(to, &bits, sizeof bits);
}

// Rounded to nearest, ties to even. Numbers out of range become 448; NaN stays NaN.
static inline void store(Fp8* to, Floats values) {
  Floats size = (Floats)((Words)values & 0x7fffffff);
  size = size > 448.0f ? splat(448.0f) : size;
  const Words bits = (Words)size;
  const Words normal = (bits + 0x7ffff + ((bits >> 20) & 1) - (120u << 23)) >> 20;
  // The last bit of 2^14 is worth 2^-9.
  const Words subnormal = (Words)(size + 16384.0f) - (Words)splat(16384.0f);
  Words code = size < 0x1p-6f ? subnormal : normal;
  code = size == size ? code : Words{} + 0x7f;
  const Bytes bytes = __builtin_convertvector(code | (((Words)values >> 24) & 0x80), Bytes);
  memcpy(to, &bytes, sizeof bytes);
}

// The first `count` lanes; the others are zero.
template <class T>
static inline Floats load_part(const T* from, int64_t count) {
  if (count >= LANES) return load(from);
  T padded[LANES] = {};
  memcpy(padded, from, count * sizeof(T));
  return load(padded);
}

template <class T>
static inline void store_part(T* to, Floats values, int64_t count) {
  if (count >= LANES) return store(to, values);
  T padded[LANES];
  store(padded, values);
  memcpy(to, padded, count * sizeof(T));
}

template <class T>
static inline Floats rounded_to(Floats values) {
  if constexpr (sizeof(T) == 4) return values;
  return from_halves(to_halves(values));
}

// Lane i gets lane i ^ STEP; reductions are built from this.
template <int STEP, int... I>
static inline Floats exchange(Floats a, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, a, (I ^ STEP)...);
}

template <int STEP = LANES / 2>
static inline float sum(Floats values) {
  values += exchange<STEP>(values, std::make_integer_sequence<int, LANES>{});
  if constexpr (STEP > 1) return sum<STEP / 2>(values);
  return values[0];
}

template <int STEP = LANES / 2>
static inline float largest(Floats values) {
  values = maximum(values, exchange<STEP>(values, std::make_integer_sequence<int, LANES>{}));
  if constexpr (STEP > 1) return largest<STEP / 2>(values);
  return values[0];
}

template <int STEP, int... I>
static inline void transpose_pair(Words& a, Words& b, std::integer_sequence<int, I...>) {
  Words low = __builtin_shufflevector(a, b, (I & STEP ? LANES + I - STEP : I)...);
  b = __builtin_shufflevector(a, b, (I & STEP ? LANES + I : I + STEP)...);
  a = low;
}

// Lane i of the result is the sum of all lanes of values[i].
template <int STEP = 1>
static inline Floats sum_each(Floats (&values)[LANES]) {
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i += 2 * STEP) {
    Words low = (Words)values[i], high = (Words)values[i + STEP];
    transpose_pair<STEP>(low, high, std::make_integer_sequence<int, LANES>{});
    values[i] = (Floats)low + (Floats)high;
  }
  if constexpr (2 * STEP < LANES) return sum_each<2 * STEP>(values);
  return values[0];
}

// Squares of SIZE x SIZE words beside each other, in log2(SIZE) rounds of exchanges.
template <int SIZE, int STEP = 1>
static inline void transpose(Words (&square)[SIZE]) {
#pragma GCC unroll 16
  for (int i = 0; i < SIZE; ++i)
    if (!(i & STEP))
      transpose_pair<STEP>(square[i], square[i + STEP],
                           std::make_integer_sequence<int, LANES>{});
  if constexpr (2 * STEP < SIZE) transpose<SIZE, 2 * STEP>(square);
}

// 2^x for x below 120, with TERMS terms of the series: 4 are exact to 2^-14, 6 to 2^-22. Far below 0
// the result is exactly 0; NaN stays NaN.
template <int TERMS = 6>
static inline Floats power_of_two(Floats x) {
  constexpr float series[] = {0.693147181f,  0.240226507f,   0.0555041087f,
                              0.00961812911f, 0.00133335581f, 0.000154035304f};
  const float shifter = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const Floats shifted = x + shifter, whole = shifted - shifter, rest = x - whole;
  Floats power = splat(series[TERMS - 1]);
  for (int i = TERMS - 2; i >= 0; --i) power = power * rest + series[i];
  power = power * rest + 1.0f;
#if LANES == 16
  // A number that is not normal would take the processor 150 cycles.
  const __mmask16 is_normal = _mm512_cmp_ps_mask((__m512)x, (__m512)splat(-126.0f), _CMP_NLT_UQ);
  return (Floats)_mm512_maskz_scalef_ps(is_normal, (__m512)power, (__m512)whole);
#else
  const Floats scale = (Floats)(((Ints)shifted - (Ints)splat(shifter) + 127) << 23);
  return x < -126.0f ? Floats{} : power * scale;
#endif
}

// Seven levels of Lambert's continued fraction near 0, and the exponential where these are less exact.
static inline Floats hyperbolic_tangent(Floats x) {
  const Floats square = x * x;
  const Floats near = x * (135135.0f + square * (17325.0f + square * (378.0f + square))) /
                      (135135.0f + square * (62370.0f + square * (3150.0f + square * 28.0f)));
  Floats size = x < 0.0f ? -x : x;
  size = size > 20.0f ? splat(20.0f) : size;
  const Floats far = 1.0f - 2.0f / (power_of_two(size * 2.88539008f) + 1.0f);  // 2 log2 e
  return size < 2.0f ? near : (x < 0.0f ? -far : far);
}
