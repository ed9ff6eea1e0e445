// What the library is told: the arguments of its functions, laid out as ctypes lays them out.
#pragma once

#include <cstdint>

struct BFloat16 {
  uint16_t bits;
};

constexpr int64_t MAX_HEAD_DIM = 256;

// rows (num_rows, size) of x and out, `*_stride` elements apart; residual may be null.
struct RmsNorm {
  const void* x;
  void* residual;
  const void* weight;
  void* out;
  int64_t num_rows, size, x_stride, residual_stride, out_stride;
  float eps;
  int threads;
};

// gate_up (num_rows, 2 * size), out (num_rows, size) contiguous.
struct SiluAndMul {
  const void* gate_up;
  void* out;
  int64_t num_rows, size, stride;
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
  int threads;
};

// New tokens [first_token, first_token + num_tokens) of a step are the last of num_keys tokens.
struct Sequence {
  int64_t row, first_token, num_tokens, num_keys;
};

// How one sequence is cut into tasks: tiles of new tokens, parts of the context, groups of heads.
struct SequencePlan {
  int64_t first_task, tile_tokens, num_parts, task_heads, first_partial;
};

// One step, all layers.
struct AttentionStep {
  int64_t num_seqs, num_tokens, num_heads, num_kv_heads, head_dim;
  int64_t block_size, block_stride, token_stride, table_stride;
  const int32_t* block_table;
  const Sequence* sequences;
  const int64_t* slots;
  const SequencePlan* plans;  // num_seqs + 1; the last one's first_task is the number of tasks
  float* workspace;
  int64_t scratch_floats;  // of one thread
  float scale;
  int threads;
};

// One layer: its keys and values in the cache's first block, and the step's vectors.
struct AttentionLayer {
  void *keys, *values;
  const void *q, *k, *v;
  int64_t q_stride, k_stride, v_stride;
  void* out;
};

// x (num_rows, size), lines `stride` elements apart; out (num_rows,).
struct Argmax {
  const float* x;
  int64_t* out;
  int64_t num_rows, size, stride;
  int threads;
};

// The functions of one instruction set, each for float and for bfloat16, or for float alone.
struct Variant {
  void (*rms_norm[2])(const RmsNorm&);
  void (*silu_and_mul[2])(const SiluAndMul&);
  void (*rotary[2])(const Rotary&);
  void (*paged_attention[2])(const AttentionStep&, const AttentionLayer&);
  void (*argmax[1])(const Argmax&);
};
