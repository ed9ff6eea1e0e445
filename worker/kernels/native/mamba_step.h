// A Mamba 2 layer: see state_step.py.

// One row of a head's state: it decays, `added` times B is added, and its product with C is returned.
static float advance_row(float* row, int64_t size, float decay, float added, const float* b,
                         const float* c) {
  Floats sums{};
  for (int64_t i = 0; i < size; i += LANES) {
    const int64_t count = size - i;
    const Floats state = decay * load_part(row + i, count) + added * load_part(b + i, count);
    store_part(row + i, state, count);
    sums += state * load_part(c + i, count);
  }
  return sum(sums);
}

// A group of heads, which have B and C in common; a few rows of a state after the other.
template <class T>
static void mamba_step(const MambaStep& call) {
  constexpr int64_t ROWS = 16;
  const int64_t head_dim = call.head_dim, size = call.state_size;
  const int64_t group_heads = call.num_heads / call.num_groups;
  const int64_t width = call.num_heads * head_dim, maps_width = call.num_groups * size;
  for_each_group(call.step, call.num_groups, [&](const StatePiece& piece, int64_t group,
                                                 float* scratch) {
    float** rows = (float**)scratch;
    float *b = scratch + 2 * head_dim, *c = b + PIECE_TOKENS * size, *x = c + PIECE_TOKENS * size;
    float *steps = x + PIECE_TOKENS * head_dim, *decays = steps + PIECE_TOKENS;
    float* copy = decays + PIECE_TOKENS;
    T* kept = (T*)(copy + head_dim * size);
    convolve(piece, width + group * size, size, kept, b);
    convolve(piece, width + maps_width + group * size, size, kept, c);
    for (int64_t head = group * group_heads; head < (group + 1) * group_heads; ++head) {
      convolve(piece, head * head_dim, head_dim, kept, x);
      const HeadState state(piece, head, head_dim, size, copy, rows);
      for (int64_t i = 0; i < piece.size(); ++i) {
        const float dt = element<T>(call.dt, piece.line(i) * call.dt_stride + head);
        steps[i] = softplus(dt + call.dt_bias[head]);
        decays[i] = expf(steps[i] * call.decay[head]);
      }
      for (int64_t first = 0; first < head_dim; first += ROWS)
        for (int64_t i = 0; i < piece.size(); ++i) {
          float* out = piece.call.out + piece.line(i) * width + head * head_dim;
          for (int64_t row = first; row < std::min(first + ROWS, head_dim); ++row) {
            const float value = x[i * head_dim + row];
            out[row] = call.skip[head] * value + advance_row(rows[row], size, decays[i],
                                                             steps[i] * value, b + i * size,
                                                             c + i * size);
          }
        }
      state.store();
    }
  });
}
