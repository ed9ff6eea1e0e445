// All kernels for one instruction set. Included once per set, inside its namespace.

#include "simd.h"

#include "fp8.h"

#include "argmax.h"
#include "tiles.h"
#include "paged_attention.h"
#include "rms_norm.h"
#include "rotary.h"
#include "gate.h"
#include "unpack.h"
#include "rounded.h"
#include "linear.h"
#include "route.h"
#include "experts.h"
#include "state_sequences.h"
#include "delta_step.h"
#include "mamba_step.h"
#include "graph.h"

static const Variant VARIANT = {
    {rms_norm<float>, rms_norm<BFloat16>},
    {gate<float>, gate<BFloat16>},
    {rotary<float>, rotary<BFloat16>},
    {paged_attention<float>, paged_attention<BFloat16>},
    {argmax},
    {linear<float>, linear<BFloat16>},
    {look_up<float>, look_up<BFloat16>},
    {route<float>, route<BFloat16>},
    {experts<float>, experts<BFloat16>},
    {delta_step<float>, delta_step<BFloat16>},
    {mamba_step<float>, mamba_step<BFloat16>},
    run_graph,
};

#undef LANES
#undef HAS_BF16_DOT
#undef HAS_AMX
#undef HAS_VNNI
