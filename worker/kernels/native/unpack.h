// Matrices as quantised files store them, unpacked a block of inputs at a time.
//
// A panel has PANEL outputs. It is a sequence of records of `span` inputs: the scales
// of all outputs, then blocks of BLOCK inputs. A block has a word of eight codes of four bits for each
// output, of which the first input has the lowest bits, and so on for its other inputs; then the upper
// bits of longer codes, 32 / (BITS - 4) inputs to a word: a byte of it has those of the inputs whose
// codes are in the same byte of their words. Codes of eight bits are four to a word.
//
// The values are those of the formats' reference, to the last bit: see `packing.py`.

constexpr int64_t BLOCK = 32;
constexpr int VECTORS = PANEL / LANES;
constexpr int UNROLL = LANES == 16 ? 8 : 1;

enum class Scales {
  HALF,      // float16 for BLOCK inputs: code * scale
  HALF_MIN,  // and an offset: code * scale + offset
  SUPER,     // float16 for 16 * 16 inputs times an int8 for each 16 of them
  SUPER_MIN, // float16 for 8 * BLOCK inputs times a uint8 for each BLOCK, an offset like it, subtracted
  EXPONENT,  // a byte e for 2^(e - 127)
  GROUP,     // float32 for a group of `span` inputs, and a uint8: (code - zero) * scale
};

// BITS: of a code. FIRST: the value of code 0, of consecutive values; TABLE: there is a table instead.
template <int BITS_, Scales SCALES_, int FIRST_ = 0, bool TABLE_ = false>
struct Form {
  static constexpr int BITS = BITS_, FIRST = FIRST_;
  static constexpr int EXTRA = BITS == 8 ? 0 : BITS - 4;  // bits of a code that are in other words
  static constexpr Scales SCALES = SCALES_;
  static constexpr bool TABLE = TABLE_;
  static constexpr int64_t BLOCK_BYTES = PANEL * BLOCK * BITS / 8;
  static constexpr int HALVES = SCALES == Scales::SUPER ? 2 : 1;  // of a block, each with a scale
  static constexpr int64_t HEADER_BYTES = PANEL * (SCALES == Scales::HALF        ? 2
                                                   : SCALES == Scales::HALF_MIN  ? 4
                                                   : SCALES == Scales::SUPER     ? 2 + 16
                                                   : SCALES == Scales::SUPER_MIN ? 4 + 16
                                                   : SCALES == Scales::EXPONENT  ? 1
                                                                                 : 5);

  // Where a byte has the upper bits of a code; second: which one of the two in a byte.
  static constexpr int upper_shift(int word, bool second) {
    return 2 * word * EXTRA % 8 + second * EXTRA;
  }

  static constexpr int64_t record_bytes(int64_t blocks) { return HEADER_BYTES + blocks * BLOCK_BYTES; }

  // Inputs of a record. group: the number given for this matrix.
  static int64_t span(int64_t group) {
    if (SCALES == Scales::GROUP) return group;
    return SCALES == Scales::SUPER || SCALES == Scales::SUPER_MIN ? 8 * BLOCK : BLOCK;
  }
};

// Calls use(Form<...>{}) with the form of a packing.
template <class Use>
static inline void with_form(Packing packing, const Use& use) {
  switch (packing) {
    case PLAIN: return;
    case Q4_0: return use(Form<4, Scales::HALF, -8>{});
    case Q4_1: return use(Form<4, Scales::HALF_MIN>{});
    case Q5_0: return use(Form<5, Scales::HALF, -16>{});
    case Q5_1: return use(Form<5, Scales::HALF_MIN>{});
    case Q8_0: return use(Form<8, Scales::HALF, -128>{});
    case Q4_K: return use(Form<4, Scales::SUPER_MIN>{});
    case Q5_K: return use(Form<5, Scales::SUPER_MIN>{});
    case Q6_K: return use(Form<6, Scales::SUPER, -32>{});
    case MXFP4: return use(Form<4, Scales::EXPONENT, 0, true>{});
    case GROUPED_INT4: return use(Form<4, Scales::GROUP>{});
    case GROUPED_INT8: return use(Form<8, Scales::GROUP>{});
  }
}

static inline Floats from_float16(const uint8_t* from) {
  Halves bits;
  memcpy(&bits, from, sizeof bits);
  const Words words = widen(bits);
  const Floats size = (Floats)((words & 0x7fff) << 13) * 0x1p112f;  // the exponents' biases differ
  return (Floats)((Words)size | (words & 0x8000) << 16);
}

static inline Words load_bytes(const uint8_t* from) {
  Bytes bytes;
  memcpy(&bytes, from, sizeof bytes);
  return widen(bytes);
}

static inline Floats from_uint8(const uint8_t* from) {
  return __builtin_convertvector((Ints)load_bytes(from), Floats);
}

static inline Floats from_int8(const uint8_t* from) {
  return __builtin_convertvector((Ints)(load_bytes(from) << 24) >> 24, Floats);
}

// The compiler would repeat a product of scales for each value, as a part of its sum.
static inline Floats not_fused(Floats product) {
#if HAS_X86_VARIANTS
  asm("" : "+v"(product));
#endif
  return product;
}

// The scales of LANES outputs in a record, for all its blocks.
struct RecordScales {
  Floats scale, offset;
};

// `lane`: the first output in the panel.
template <class F>
INLINE static inline RecordScales record_scales(const uint8_t* record, int64_t lane) {
  constexpr Scales kind = F::SCALES;
  const uint8_t *halves = record + 2 * lane, *second = halves + 2 * PANEL;
  if constexpr (kind == Scales::HALF_MIN || kind == Scales::SUPER_MIN)
    return {from_float16(halves), from_float16(second)};
  else if constexpr (kind == Scales::HALF || kind == Scales::SUPER)
    return {from_float16(halves), Floats{}};
  else if constexpr (kind == Scales::EXPONENT) {
    const Words exponents = load_bytes(record + lane);
    return {(Floats)(exponents == 0 ? Words{} + (1 << 22) : exponents << 23), Floats{}};
  } else
    return {load((const float*)record + lane), from_uint8(record + 4 * PANEL + lane)};
}

// The scales in one block: of its first and second half. A value is code * scale + offset, exact but
// for one rounding; with Scales::GROUP it is (code - offset) * scale.
struct BlockScales {
  Floats scale[2], offset[2];
};

template <class F>
INLINE static inline BlockScales block_scales(const RecordScales& of_record, const uint8_t* record,
                                              int64_t block, int64_t lane) {
  constexpr Scales kind = F::SCALES;
  const Floats scale = of_record.scale;
  if constexpr (kind == Scales::SUPER) {
    const uint8_t* factors = record + 2 * PANEL + 2 * block * PANEL + lane;
    const Floats low = scale * from_int8(factors),
                 high = scale * from_int8(factors + PANEL);
    return {{low, high}, {not_fused(low * F::FIRST), not_fused(high * F::FIRST)}};
  } else if constexpr (kind == Scales::SUPER_MIN) {
    const uint8_t* factors = record + 4 * PANEL + block * PANEL + lane;
    const Floats product = scale * from_uint8(factors);
    const Floats offset = not_fused(-of_record.offset * from_uint8(factors + 8 * PANEL));
    return {{product, product}, {offset, offset}};
  } else {
    const Floats offset = kind == Scales::HALF ? not_fused(scale * F::FIRST) : of_record.offset;
    return {{scale, scale}, {offset, offset}};
  }
}

constexpr float FP4_VALUES[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6};

template <bool TABLE>
static inline Floats table_from(int first) {
  Floats table;
  for (int i = 0; i < LANES; ++i) table[i] = TABLE ? FP4_VALUES[i % 16] : float(first + i);
  return table;
}

// The numbers of codes in the lowest bits of each lane; the bits above may be anything.
template <class F>
static inline Floats numbers_of(Words codes) {
#if LANES == 16  // a permutation is faster than a mask and a conversion
  if constexpr (F::BITS == 4)
    return (Floats)_mm512_maskz_permutexvar_ps(0xffff, (__m512i)codes,
                                               (__m512)table_from<F::TABLE>(0));
  if constexpr (F::BITS == 5)
    return (Floats)_mm512_permutex2var_ps((__m512)table_from<false>(0), (__m512i)codes,
                                          (__m512)table_from<false>(16));
#endif
  codes &= (1 << F::BITS) - 1;
  if constexpr (F::TABLE) {
    Floats values;
    for (int i = 0; i < LANES; ++i) values[i] = FP4_VALUES[codes[i]];
    return values;
  }
  return __builtin_convertvector((Ints)codes, Floats);
}

// Calls emit(i, input, first, second) for each pair of inputs of a block and each i of VECTORS: the
// values of LANES outputs. Pairs come in order.
template <class F, class Emit>
INLINE static inline void unpack_block(const RecordScales (&of_record)[VECTORS],
                                       const uint8_t* record, int64_t block, const Emit& emit) {
  const auto* codes = (const uint32_t*)(record + F::HEADER_BYTES + block * F::BLOCK_BYTES);
  const auto* upper = codes + PANEL * BLOCK / 8;
  constexpr int PER_WORD = F::BITS == 8 ? 4 : 8, EXTRA = F::EXTRA;
  BlockScales scales[VECTORS];
#pragma GCC unroll 8
  for (int i = 0; i < VECTORS; ++i)
    scales[i] = block_scales<F>(of_record[i], record, block, i * LANES);
#pragma GCC unroll UNROLL
  for (int word = 0; word < BLOCK / PER_WORD; ++word) {
#pragma GCC unroll UNROLL
    for (int i = 0; i < VECTORS; ++i) {
      const Words packed = load(codes + word * PANEL + i * LANES);
      [[maybe_unused]] Words rest{};
      if constexpr (EXTRA > 0) rest = load(upper + word * EXTRA / 4 * PANEL + i * LANES);
      const auto value = [&](int n) INLINE {
        Words code;
        if constexpr (F::BITS == 8)
          code = packed >> 8 * n;
        else if constexpr (EXTRA > 0) {
          constexpr uint32_t mask = ((1u << EXTRA) - 1) << 4;
          const int shift = n / 2 * 8 + F::upper_shift(word, n % 2);
          const Words high = shift < 4 ? rest << (4 - shift) : rest >> (shift - 4);
          code = (packed >> 4 * n & ~mask) | (high & mask);
        } else
          code = packed >> 4 * n;
        const Floats number = numbers_of<F>(code);
        const Floats scale = scales[i].scale[word * PER_WORD / 16];
        const Floats offset = scales[i].offset[word * PER_WORD / 16];
        if constexpr (F::SCALES == Scales::GROUP) return (number - offset) * scale;
        if constexpr (F::SCALES == Scales::EXPONENT) return number * scale;
        return number * scale + offset;
      };
#pragma GCC unroll UNROLL
      for (int n = 0; n < PER_WORD; n += 2)
        emit(i, word * PER_WORD + n, value(n), value(n + 1));
    }
  }
}

template <class F>
INLINE static inline void load_scales(const uint8_t* record, RecordScales (&scales)[VECTORS]) {
#pragma GCC unroll 8
  for (int i = 0; i < VECTORS; ++i) scales[i] = record_scales<F>(record, i * LANES);
}

constexpr int64_t AHEAD_BYTES = 8192;  // of a panel that are fetched before they are read

template <class F>
INLINE static inline void fetch_ahead(const uint8_t* record, int64_t block) {
  const uint8_t* ahead = record + F::HEADER_BYTES + block * F::BLOCK_BYTES + AHEAD_BYTES;
#pragma GCC unroll 16
  for (int64_t i = 0; i < F::BLOCK_BYTES; i += 64) __builtin_prefetch(ahead + i, 0, 1);
}
