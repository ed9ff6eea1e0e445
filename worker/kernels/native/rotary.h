// Rotary positions in place, after an optional normalisation of each head.

// Rotates the pairs (i, i + num_pairs) of the first 2 * num_pairs elements; the rest is unchanged.
template <class T>
static inline void rotate_head(T* head, const float* cos, const float* sin, int64_t num_pairs) {
  T* other = head + num_pairs;
  for (int64_t i = 0; i < num_pairs; i += LANES) {
    const int64_t left = num_pairs - i;
    Floats c = load_part(cos + i, left), s = load_part(sin + i, left);
    Floats a = load_part(head + i, left), b = load_part(other + i, left);
    store_part(head + i, a * c - b * s, left);
    store_part(other + i, b * c + a * s, left);
  }
}

template <class T>
static void rotary_in_team(const Rotary& call) {
#pragma omp for nowait
  for (int64_t token = 0; token < call.num_tokens; ++token) {
    const float* cos = call.table + call.positions[token] * 2 * call.num_pairs;
    for (const Heads& heads : call.heads)
      for (int64_t h = 0; h < heads.num_heads; ++h) {
        T* head = (T*)heads.data + token * heads.stride + h * call.head_dim;
        if (heads.norm && call.has_float_norms)
          rms_norm_row(head, (T*)nullptr, (const float*)heads.norm, head, call.head_dim, call.eps);
        else if (heads.norm)
          rms_norm_row(head, (T*)nullptr, (const T*)heads.norm, head, call.head_dim, call.eps);
        rotate_head(head, cos, cos + call.num_pairs, call.num_pairs);
      }
  }
}

template <class T>
static void rotary(const Rotary& call) {
  run_in_team(call.threads, [&] { rotary_in_team<T>(call); });
}
