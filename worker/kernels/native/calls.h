// The arguments of the library's functions, with the layout that native.py packs.
#pragma once

#include <cstdint>

constexpr int INTERFACE = 8;  // of this file, as in native.py; raise both with every change

struct BFloat16 {
  uint16_t bits;
};

struct Fp8 {
  uint8_t bits;
};

constexpr int64_t MAX_HEAD_DIM = 576;

// rows (num_rows, size) of x and out, `*_stride` elements apart; residual may be null. With a float
// weight, the normalised value is not rounded before the product.
struct RmsNorm {
  const void* x;
  void* residual;
  const void* weight;
  void* out;
  int64_t num_rows, size, x_stride, residual_stride, out_stride;
  float eps;
  int has_float_weight;
  int threads;
};

enum Activation : int32_t { SILU, GELU, GELU_TANH, CLAMPED_SWIGLU };

// The activation between the two products of an MLP; alpha and limit are for CLAMPED_SWIGLU only.
struct Gate {
  Activation activation;
  float alpha, limit;
};

// gate_up (num_rows, 2 * size), gates first; out (num_rows, size) contiguous.
struct GateAndMul {
  const void* gate_up;
  void* out;
  int64_t num_rows, size, stride;
  Gate gate;
  int threads;
};

// (num_tokens, num_heads, head_dim), tokens `stride` elements apart; norm: (head_dim,) or null.
struct Heads {
  void* data;
  int64_t num_heads, stride;
  const void* norm;
};

// table: (max_positions, 2, num_pairs), cosines and sines.
struct Rotary {
  Heads heads[2];
  const int64_t* positions;
  const float* table;
  int64_t num_tokens, head_dim, num_pairs;
  float eps;
  int has_float_norms;
  int threads;
};

// One sequence: its new tokens are [first_token, first_token + num_tokens) of the step, and the last
// of its num_keys tokens.
struct Sequence {
  int64_t row, first_token, num_tokens, num_keys;
};

// How one sequence is divided into tasks: tiles of new tokens, parts of the context, groups of heads.
struct SequencePlan {
  int64_t first_task, tile_tokens, num_parts, task_heads, first_partial;
};

// Which earlier tokens a token attends to: the last `window`, itself included, or those of its own
// chunk of `chunk` tokens, counted from the sequence's first; 0 is no limit.
struct Reach {
  int64_t window, chunk;

  int64_t first_key(int64_t position) const {
    if (window) return position < window ? 0 : position - window + 1;
    return chunk ? position - position % chunk : 0;
  }
};

// One step, all layers. Strides are in elements of the cache; the tokens of a block are contiguous
// within a head.
struct AttentionStep {
  Reach reach;
  int64_t num_seqs, num_tokens, num_heads, num_kv_heads, head_dim;
  int64_t block_size, block_stride, head_stride, table_stride;
  const int32_t* block_table;
  const Sequence* sequences;
  const int64_t* slots;
  const SequencePlan* plans;  // num_seqs + 1; the last one's first_task is the number of tasks
  float* workspace;
  int64_t scratch_floats;  // per thread
  float scale, softcap;    // factor on scores, and the soft cap on them; 0 is no cap
  int threads;
  int is_fp8;  // the cache holds Fp8 instead of the dtype of the computation
};

// One layer: its keys and values in the cache's first block, of the first head, and the step's vectors. sinks
// (num_heads,): a score per head that takes part in the softmax but has no value; may be null.
// key_scale, value_scale: stored numbers times the scale are the original ones; 1 unless the cache
// holds Fp8.
struct AttentionLayer {
  void *keys, *values;
  const void *q, *k, *v;
  int64_t q_stride, k_stride, v_stride;
  const float* sinks;
  void* out;
  float key_scale, value_scale;
};

// x (num_rows, size), lines `stride` elements apart; out, num_non_finite (num_rows,).
struct Argmax {
  const float* x;
  int64_t* out;
  int32_t* num_non_finite;
  int64_t num_rows, size, stride;
  int threads;
};

constexpr int64_t PANEL = 32;  // outputs of a matrix that are packed together

// How the weights of a matrix are stored, see unpack.h. In the order of packing.py.
enum Packing : int32_t {
  PLAIN,
  Q4_0,
  Q4_1,
  Q5_0,
  Q5_1,
  Q8_0,
  Q4_K,
  Q5_K,
  Q6_K,
  MXFP4,
  GROUPED_INT4,
  GROUPED_INT8
};

// x (num_rows, in_features), rows `x_stride` elements apart, in bfloat16 both even; panels: see
// linear.h; group: inputs of a group, of packings that have any; bias (out_features,) or null; out
// (num_rows, out_features), rows `out_stride` elements apart. All of one dtype. Plain panels in
// bfloat16 need a processor with products of it. rounds_inputs: see rounded.h; only for packings
// that are not plain.
struct Linear {
  const void* x;
  const void* panels;
  const void* bias;
  void* out;
  int64_t num_rows, in_features, out_features, x_stride, out_stride, group;
  Packing packing;
  int rounds_inputs;
  int threads;
};

// Rows of a matrix. indices (num_rows,); panels: not plain; out (num_rows, in_features).
struct LookUp {
  const int64_t* indices;
  const void* panels;
  void* out;
  int64_t num_rows, in_features, group;
  Packing packing;
  int threads;
};

// x (num_tokens, size), `x_stride` elements apart; weight (num_experts, size); bias, correction
// (num_experts,) or null; scores: scratch, 3 * num_experts per token. Results (num_tokens, top_k).
struct Route {
  const void* x;
  const float *weight, *bias, *correction;
  float *scores, *weights;
  int64_t* chosen;
  int64_t num_tokens, num_experts, size, x_stride, top_k, num_groups, top_k_groups;
  float scale;
  int is_sigmoid, renormalises;
  int threads;
};

// x (num_tokens, size), `x_stride` elements apart; weights, chosen (num_tokens, top_k); gate_up, down
// and gate_up_bias: packed, see experts.h; down_bias (num_experts, size); biases may be null; shared
// (num_tokens, size): added to the result, may be null; out (num_tokens, size).
// Scratch: rows (num_tokens * top_k, size), hidden (num_tokens * top_k, width), sorted
// (1 + 2 * num_experts + num_tokens * top_k).
struct Experts {
  const void* x;
  const float* weights;
  const int64_t* chosen;
  const void *gate_up, *down, *gate_up_bias, *down_bias, *shared;
  void *rows, *hidden;
  int64_t* sorted;
  void* out;
  int64_t num_tokens, num_experts, top_k, size, width, x_stride;
  int64_t gate_up_group, down_group;
  Packing gate_up_packing, down_packing;
  Gate gate;
  int weighs_inputs, rounds_inputs;
  int threads;
};

// Sequences of a layer with states: inputs (num_tokens, num_channels), tokens `input_stride` elements
// apart; conv_bias may be null. A sequence of no keys has one token, and no state. pages: blocks of
// whole units. The units of a layer's states and kept inputs begin at `first_*_unit` of each state. After
// stops[first_stops[i]...] tokens of sequence i, ascending, its state is kept, in the pages of the same
// line of stop_tables. scratch: `scratch_floats` per thread. out (num_tokens, width of all heads).
struct StateStep {
  const void* inputs;
  uint8_t* pages;
  const int32_t *block_table, *stop_tables;
  const Sequence* sequences;
  const int64_t *stops, *first_stops;
  const float *conv_weight, *conv_bias;
  float *out, *scratch;
  int64_t num_seqs, num_channels, conv_width, input_stride, table_stride, stop_stride;
  int64_t block_bytes, unit_bytes, page_units, first_state_unit, first_kept_unit, scratch_floats;
  int64_t threads;
};

// dt and beta (num_tokens, num_heads), tokens `*_stride` elements apart.
struct DeltaStep {
  StateStep step;
  const void *dt, *beta;
  const float *decay, *dt_bias;
  int64_t num_heads, num_key_heads, key_dim, value_dim, dt_stride, beta_stride;
  float eps;
};

// dt (num_tokens, num_heads), tokens `dt_stride` elements apart.
struct MambaStep {
  StateStep step;
  const void* dt;
  const float *decay, *skip, *dt_bias;
  int64_t num_heads, num_groups, head_dim, state_size, dt_stride;
};

// The kernels of a graph. GraphCall.step: index of the attention step of a replay.
enum Kernel : int32_t { RMS_NORM, GATE, ROTARY, PAGED_ATTENTION, LINEAR, ROUTE, EXPERTS };

struct GraphCall {
  Kernel kernel;
  int32_t is_bfloat16;
  const void* arguments;
  int64_t step;
};

// The functions of one instruction set, each for float and for bfloat16, or for float alone.
struct Variant {
  void (*rms_norm[2])(const RmsNorm&);
  void (*gate[2])(const GateAndMul&);
  void (*rotary[2])(const Rotary&);
  void (*paged_attention[2])(const AttentionStep&, const AttentionLayer&);
  void (*argmax[1])(const Argmax&);
  void (*linear[2])(const Linear&);
  void (*look_up[2])(const LookUp&);
  void (*route[2])(const Route&);
  void (*experts[2])(const Experts&);
  void (*delta_step[2])(const DeltaStep&);
  void (*mamba_step[2])(const MambaStep&);
  void (*run_graph)(const GraphCall*, int64_t num_calls, int64_t captured, int64_t tokens,
                    const AttentionStep* const*, int threads);
};
