// The experts of a mixture, each applied to the rows that chose it.
//
// Rows are sorted by expert, so a panel of weights is read once for all rows of its expert, and not
// at all if there are none. A panel of `gate_up` has the gate and the up rows of PANEL / 2 outputs, so
// the activation is computed in registers. See linear.h for the order of the sums.

constexpr int64_t GATED = PANEL / 2;

// The scratch of a call, in order: experts with rows; the end of each expert's rows; the sorted place
// of the row of each (token, choice).
struct Sorted {
  int64_t &num_active, *active, *ends, *places;

  explicit Sorted(const Experts& call)
      : num_active(call.sorted[0]),
        active(call.sorted + 1),
        ends(active + call.num_experts),
        places(ends + call.num_experts) {}

  int64_t begin(int64_t expert) const { return expert ? ends[expert - 1] : 0; }
};

static void sort_by_expert(const Experts& call, const Sorted& sorted) {
  const int64_t num_rows = call.num_tokens * call.top_k;
  std::fill_n(sorted.ends, call.num_experts, 0);
  for (int64_t i = 0; i < num_rows; ++i) ++sorted.ends[call.chosen[i]];
  sorted.num_active = 0;
  int64_t end = 0;
  for (int64_t expert = 0; expert < call.num_experts; ++expert) {
    const int64_t count = sorted.ends[expert];
    if (count) sorted.active[sorted.num_active++] = expert;
    sorted.ends[expert] = end;  // of those placed so far
    end += count;
  }
  for (int64_t i = 0; i < num_rows; ++i) sorted.places[i] = sorted.ends[call.chosen[i]]++;
}

// Calls task(expert, panel) for all experts with rows.
template <class Task>
static inline void for_active_panels(const Sorted& sorted, int64_t num_panels, const Task& task) {
  const int64_t num_tasks = sorted.num_active * num_panels;
  const int64_t chunk = std::max<int64_t>(1, num_tasks / (16 * omp_get_num_threads()));
#pragma omp for schedule(dynamic, chunk) nowait
  for (int64_t i = 0; i < num_tasks; ++i) task(sorted.active[i / num_panels], i % num_panels);
  wait_for_team();
}

template <class T>
static void experts_in_team(const Experts& call) {
  const int64_t size = call.size, width = call.width, top_k = call.top_k;
  const int64_t gate_panels = ceil_div(width, GATED), down_panels = ceil_div(size, PANEL);
  T *rows = (T*)call.rows, *hidden = (T*)call.hidden;
  const Panels gate_up{(const uint8_t*)call.gate_up, call.gate_up_packing, call.gate_up_group, size,
                       call.rounds_inputs && call.gate_up_packing != PLAIN};
  const Panels down{(const uint8_t*)call.down, call.down_packing, call.down_group, width,
                    call.rounds_inputs && call.down_packing != PLAIN};
  const Sorted sorted(call);
#pragma omp single nowait
  sort_by_expert(call, sorted);
  wait_for_team();

#pragma omp for nowait
  for (int64_t i = 0; i < call.num_tokens * top_k; ++i) {
    const T* x = (const T*)call.x + i / top_k * call.x_stride;
    T* row = rows + sorted.places[i] * size;
    if (!call.weighs_inputs) {
      memcpy(row, x, size * sizeof(T));
    } else {
      const Floats weight = rounded_to<T>(splat(call.weights[i]));
      for (int64_t c = 0; c < size; c += LANES)
        store_part(row + c, load_part(x + c, size - c) * weight, size - c);
    }
    if (gate_up.rounds_inputs) round_row(row, size, gate_up.packing, row);
  }
  wait_for_team();

  for_active_panels(sorted, gate_panels, [&](int64_t expert, int64_t p) {
    const int64_t panel = expert * gate_panels + p;
    Floats bias[VECTORS];
    load_columns((const T*)call.gate_up_bias, panel * PANEL, INT64_MAX, bias);
    multiply_rows<T>(sorted.begin(expert), sorted.ends[expert], rows, size, gate_up, panel,
                     [&](int64_t row, const Floats* sums) {
                       for (int i = 0; i < VECTORS / 2; ++i) {
                         const int64_t column = p * GATED + i * LANES;
                         if (column >= width) break;
                         const int up = i + VECTORS / 2;
                         const Floats value =
                             gated<T>(call.gate, rounded_to<T>(sums[i] + bias[i]),
                                      rounded_to<T>(sums[up] + bias[up]));
                         store_part(hidden + row * width + column, value, width - column);
                       }
                     });
  });

  if (down.rounds_inputs) {
#pragma omp for nowait
    for (int64_t i = 0; i < call.num_tokens * top_k; ++i)
      round_row(hidden + i * width, width, down.packing, hidden + i * width);
    wait_for_team();
  }
  for_active_panels(sorted, down_panels, [&](int64_t expert, int64_t p) {
    Floats bias[VECTORS];
    const T* biases = (const T*)call.down_bias;
    load_columns(biases ? biases + expert * size : nullptr, p * PANEL, size, bias);
    multiply_rows<T>(sorted.begin(expert), sorted.ends[expert], hidden, width, down,
                     expert * down_panels + p,
                     [&](int64_t row, const Floats* sums) {
                       store_columns(rows + row * size, p * PANEL, size, sums, bias);
                     });
  });

#pragma omp for nowait
  for (int64_t token = 0; token < call.num_tokens; ++token) {
    const T* shared = call.shared ? (const T*)call.shared + token * size : nullptr;
    for (int64_t c = 0; c < size; c += LANES) {
      Floats total = shared ? load_part(shared + c, size - c) : Floats{};
      for (int64_t i = token * top_k; i < (token + 1) * top_k; ++i) {
        const float weight = call.weighs_inputs ? 1.0f : call.weights[i];
        total += load_part(rows + sorted.places[i] * size + c, size - c) *
                 rounded_to<T>(splat(weight));
      }
      store_part((T*)call.out + token * size + c, total, size - c);
    }
  }
}

template <class T>
static void experts(const Experts& call) {
  run_in_team(call.threads, [&] { experts_in_team<T>(call); });
}
