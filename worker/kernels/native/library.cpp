// The library: every kernel once per instruction set, and the selection at run time.
//
// It is not linked to an OpenMP runtime. GOMP_* and omp_* resolve to the runtime that the process has
// already loaded, torch's or a preloaded one, so the library and torch share one thread pool.

#include "calls.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include <omp.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define HAS_X86_VARIANTS 1
#include <cpuid.h>
#include <immintrin.h>
#endif

#define INLINE __attribute__((always_inline))

#include "attention_plan.h"
#include "team.h"

namespace generic {
#define LANES 4
#define HAS_BF16_DOT 0
#define HAS_AMX 0
#define HAS_VNNI 0
#include "variant.h"
}  // namespace generic

#if HAS_X86_VARIANTS
#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace avx2 {
#define LANES 8
#define HAS_BF16_DOT 0
#define HAS_AMX 0
#define HAS_VNNI 0
#include "variant.h"
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma")
namespace avx512 {
#define LANES 16
#define HAS_BF16_DOT 0
#define HAS_AMX 0
#define HAS_VNNI 0
#include "variant.h"
}  // namespace avx512
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,fma")
namespace avx512bf16 {
#define LANES 16
#define HAS_BF16_DOT 1
#define HAS_AMX 0
#define HAS_VNNI 1
#include "variant.h"
}  // namespace avx512bf16
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,fma,amx-tile,amx-bf16")
namespace amx {
#define LANES 16
#define HAS_BF16_DOT 1
#define HAS_AMX 1
#define HAS_VNNI 1
#include "variant.h"
}  // namespace amx
#pragma GCC pop_options
#endif

static const Variant* const VARIANTS[] = {
    &generic::VARIANT,
#if HAS_X86_VARIANTS
    &avx2::VARIANT,
    &avx512::VARIANT,
    &avx512bf16::VARIANT,
    &amx::VARIANT,
#endif
};

#if HAS_X86_VARIANTS
// Linux saves the tiles of a process once it has asked for it.
static bool may_use_tiles() {
#ifdef __linux__
  unsigned a, b, c, d;
  constexpr unsigned BF16 = 1 << 22, TILE = 1 << 24;
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && d & BF16 && d & TILE &&
         syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
  return false;
#endif
}
#endif

static bool is_supported(int variant) {
#if HAS_X86_VARIANTS
  switch (variant) {
    case 1:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case 2:
      return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("avx512dq");
    case 3:
      return is_supported(2) && __builtin_cpu_supports("avx512bf16") &&
             __builtin_cpu_supports("avx512vnni");
    case 4:
      return is_supported(3) && may_use_tiles();
  }
#endif
  return variant == 0;
}

extern "C" {
#pragma GCC visibility push(default)

// The version of calls.h. native.py compares it, because a library built from another version would
// misread its arguments.
int longshore_interface() { return INTERFACE; }

// The variant's functions, or null if the library or this processor does not have it.
const Variant* longshore_variant(int variant) {
  const bool is_known = variant >= 0 && variant < int(sizeof VARIANTS / sizeof *VARIANTS);
  return is_known && is_supported(variant) ? VARIANTS[variant] : nullptr;
}

// Fills plans (num_seqs + 1). Returns the workspace size of the step in floats. The workspace begins
// with the scratch of the threads (`scratch_floats` each).
int64_t longshore_plan_attention(const Sequence* sequences, int64_t num_seqs, int64_t window,
                                 int64_t chunk, int64_t num_heads, int64_t num_kv_heads,
                                 int64_t head_dim, int is_fp8, int threads, SequencePlan* plans,
                                 int64_t* scratch_floats) {
  return plan_attention(sequences, num_seqs, {window, chunk}, num_heads, num_kv_heads, head_dim,
                        is_fp8, threads, plans, *scratch_floats);
}

#pragma GCC visibility pop
}  // extern "C"
