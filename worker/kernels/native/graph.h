// A fixed sequence of calls on one team of threads: a CUDA graph for the CPU.
//
// The calls were recorded with `captured` tokens and are replayed with `tokens`. The threads wait for
// each other after each call, so the next one sees its results.

template <class T>
static void run_call(const GraphCall& call, int64_t captured, int64_t tokens,
                     const AttentionStep* const* steps) {
  const auto rows = [&](int64_t num_rows) { return num_rows / captured * tokens; };
  switch (call.kernel) {
    case RMS_NORM: {
      RmsNorm one = *(const RmsNorm*)call.arguments;
      one.num_rows = rows(one.num_rows);
      return rms_norm_in_team<T>(one);
    }
    case GATE: {
      GateAndMul one = *(const GateAndMul*)call.arguments;
      one.num_rows = rows(one.num_rows);
      return gate_in_team<T>(one);
    }
    case ROTARY: {
      Rotary one = *(const Rotary*)call.arguments;
      one.num_tokens = rows(one.num_tokens);
      return rotary_in_team<T>(one);
    }
    case PAGED_ATTENTION:
      return paged_attention_in_team<T>(*steps[call.step], *(const AttentionLayer*)call.arguments);
    case LINEAR: {
      Linear one = *(const Linear*)call.arguments;
      one.num_rows = rows(one.num_rows);
      return linear_in_team<T>(one);
    }
    case ROUTE: {
      Route one = *(const Route*)call.arguments;
      one.num_tokens = rows(one.num_tokens);
      return route_in_team<T>(one);
    }
    case EXPERTS: {
      Experts one = *(const Experts*)call.arguments;
      one.num_tokens = rows(one.num_tokens);
      return experts_in_team<T>(one);
    }
  }
}

static void run_graph(const GraphCall* calls, int64_t num_calls, int64_t captured, int64_t tokens,
                      const AttentionStep* const* steps, int threads) {
  run_in_team(threads, [&] {
    for (int64_t i = 0; i < num_calls; ++i) {
      if (calls[i].is_bfloat16)
        run_call<BFloat16>(calls[i], captured, tokens, steps);
      else
        run_call<float>(calls[i], captured, tokens, steps);
      wait_for_team();
    }
  });
}
