// How a step's attention is divided into tasks; the same for every instruction set.
#pragma once

#include "calls.h"

#include <algorithm>

constexpr int64_t BLOCK_KEYS = 64;  // keys that are multiplied at once
constexpr int64_t TILE_ROWS = 128;  // queries of one KV head in one task, which share packed keys
constexpr int64_t PART_KEYS = 512;  // context of one task, if the context is cut
constexpr int64_t MAX_CUT_TOKENS = 16;  // longer chunks have enough tiles without cutting it
constexpr int64_t TASKS_PER_THREAD = 4;

constexpr int64_t ROW_ALIGNMENT = 16;  // of a head's queries, where products are made of tiles
constexpr int64_t STATE_FLOATS = 32;  // size of a RowState, aligned like its vector

struct Task {
  const Sequence* sequence;
  int64_t tile_start, tile_tokens;  // new tokens of the sequence
  int64_t first_head, num_heads;    // KV heads
  int64_t first_key, end_key;
  int64_t partial;  // place in the workspace for a part of the context; 0 if the task has all of it
};

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Floats of one query vector, padded for any instruction set.
static inline int64_t padded(int64_t head_dim) { return ceil_div(head_dim, 16) * 16; }

static int64_t num_tiles(const Sequence& sequence, const SequencePlan& plan) {
  return ceil_div(sequence.num_tokens, plan.tile_tokens);
}

// The number of heads per task depends on the number of threads. This does not change results.
static int64_t plan_attention(const Sequence* sequences, int64_t num_seqs, Reach reach, int64_t num_heads,
                              int64_t num_kv_heads, int64_t head_dim, bool is_fp8, int threads,
                              SequencePlan* plans, int64_t& scratch) {
  const int64_t group = num_heads / num_kv_heads;
  int64_t num_pieces = 0;
  for (int64_t s = 0; s < num_seqs; ++s) {
    const Sequence& sequence = sequences[s];
    SequencePlan& plan = plans[s];
    plan.tile_tokens = std::min(sequence.num_tokens, std::max<int64_t>(1, TILE_ROWS / group));
    const bool is_cut = sequence.num_tokens <= std::min(plan.tile_tokens, MAX_CUT_TOKENS);
    const int64_t first_key = reach.first_key(sequence.num_keys - sequence.num_tokens);
    plan.num_parts = is_cut ? ceil_div(sequence.num_keys - first_key, PART_KEYS) : 1;
    num_pieces += num_tiles(sequence, plan) * plan.num_parts;
  }
  const int64_t wanted_heads = num_pieces * num_kv_heads / (TASKS_PER_THREAD * threads);
  int64_t num_tasks = 0, max_rows = 0, num_partials = 0;
  for (int64_t s = 0; s < num_seqs; ++s) {
    SequencePlan& plan = plans[s];
    const int64_t rows = plan.tile_tokens * group;
    plan.task_heads = std::clamp<int64_t>(std::min(wanted_heads, TILE_ROWS / rows), 1, num_kv_heads);
    plan.first_task = num_tasks;
    plan.first_partial = num_partials;
    num_tasks += num_tiles(sequences[s], plan) * plan.num_parts *
                 ceil_div(num_kv_heads, plan.task_heads);
    max_rows = std::max(max_rows, ceil_div(rows, ROW_ALIGNMENT) * ROW_ALIGNMENT * plan.task_heads);
    if (plan.num_parts > 1)
      num_partials += plan.num_parts * num_kv_heads * rows * (padded(head_dim) + 2);
  }
  plans[num_seqs] = {num_tasks, 0, 0, 0, num_partials};
  // A multiple of a cache line, so that threads do not share cache lines.
  scratch = padded(head_dim) * 2 * (BLOCK_KEYS * (is_fp8 ? 2 : 1) + max_rows) +
            STATE_FLOATS * max_rows;
  for (int64_t s = 0; s < num_seqs; ++s) plans[s].first_partial += scratch * threads;
  return scratch * threads + num_partials;
}

static Task make_task(const AttentionStep& step, int64_t number) {
  const SequencePlan* plan =
      std::upper_bound(step.plans, step.plans + step.num_seqs, number,
                       [](int64_t n, const SequencePlan& p) { return n < p.first_task; }) -
      1;
  const Sequence& sequence = step.sequences[plan - step.plans];
  const int64_t head_groups = ceil_div(step.num_kv_heads, plan->task_heads);
  int64_t rest = number - plan->first_task;
  const int64_t first_head = rest % head_groups * plan->task_heads;
  rest /= head_groups;
  const int64_t part = rest % plan->num_parts, tile_start = rest / plan->num_parts * plan->tile_tokens;
  const int64_t tile_tokens = std::min(plan->tile_tokens, sequence.num_tokens - tile_start);
  const int64_t position = sequence.num_keys - sequence.num_tokens + tile_start;
  const int64_t first_key = step.reach.first_key(position), end_key = position + tile_tokens;
  const bool is_part = plan->num_parts > 1;
  return {
      &sequence,
      tile_start,
      tile_tokens,
      first_head,
      std::min(plan->task_heads, step.num_kv_heads - first_head),
      first_key + part * PART_KEYS,
      is_part ? std::min(end_key, first_key + (part + 1) * PART_KEYS) : end_key,
      is_part ? plan->first_partial + part * step.num_kv_heads * tile_tokens *
                                          (step.num_heads / step.num_kv_heads) *
                                          (padded(step.head_dim) + 2)
              : 0,
  };
}
