"""Cost models of GPUs that are computed from the sizes of a model and the data sheet of the GPU.

Of one step, with T tokens, A pairs of a token and a position that it attends to, C tokens of
context, S sampled tokens, on G GPUs that share each layer:

    compute  = (2 * P * T + 4 * L * H * D * A + 2 * V * E * S) / (G * F * 0.6)
    memory   = (W + K * (C + T)) / (G * B * 0.8)
    overhead = 0.5 ms + 2 µs per request, and for G > 1, per layer two all-reduces:
               2 * L * (10 µs + 2 * (G - 1) / G * 2 * E * T / N)

P: parameters of the layers; L, H, D, E, V: layers, query heads, head size, hidden size, vocabulary;
W: bytes of all weights; K: bytes of KV per token; F, B, N: peak FLOP/s, memory bandwidth and NVLink
bandwidth in one direction, of a GPU. The shares 0.6 and 0.8 of the peaks and the overheads are
assumptions, not measurements: use `longshore bench fit-cost` for a real engine.
"""

from dataclasses import dataclass
from typing import Final

from longshore.deploy.simulator.cost_model import CostModel, HostTimes, StepTerms, TransferRates

COMPUTE_SHARE: Final = 0.6
BANDWIDTH_SHARE: Final = 0.8
STEP_S: Final = 0.5e-3
ROW_S: Final = 2e-6
ALL_REDUCE_S: Final = 10e-6
MEMORY_SHARE: Final = 0.9
ACTIVATION_BYTES: Final = 2 << 30
HOST: Final = HostTimes(arrival_s=1e-3, plan_s=0.3e-3, output_s=0.5e-3)
ELEMENT_BYTES: Final = 2  # bfloat16


@dataclass(frozen=True)
class GPU:
    """A GPU as described by its data sheet; peak_flops: dense bfloat16."""

    name: str
    peak_flops: float
    bandwidth: float
    memory_bytes: int
    link_bandwidth: float
    host_bandwidth: float = 55e9  # PCIe 5.0 x16 in one direction has 63 GB/s
    network_bandwidth: float = 45e9  # a network adapter of 400 Gb/s has 50 GB/s


@dataclass(frozen=True)
class DenseModel:
    """A model as described by its config.json; num_parameters: of the layers, without embeddings
    and output layer."""

    name: str
    num_parameters: float
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights that a step reads: a step reads few rows of the embeddings."""
        return ELEMENT_BYTES * (self.num_parameters + self.vocab_size * self.hidden_size)

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * ELEMENT_BYTES


H100: Final = GPU("H100 SXM 80 GB", 989.4e12, 3.35e12, 80 * 10**9, 450e9)
H200: Final = GPU("H200 SXM 141 GB", 989.4e12, 4.8e12, 141 * 10**9, 450e9)
LLAMA_8B: Final = DenseModel("Llama 3.1 8B", 6.98e9, 32, 4096, 32, 8, 128, 128_256)
QWEN_32B: Final = DenseModel("Qwen2.5 32B", 31.2e9, 64, 5120, 40, 8, 128, 152_064)


def roofline(name: str, gpu: GPU, model: DenseModel, num_gpus: int = 1) -> CostModel:
    """The formulas above."""
    flops = num_gpus * gpu.peak_flops * COMPUTE_SHARE
    bandwidth = num_gpus * gpu.bandwidth * BANDWIDTH_SHARE
    kv_bytes = model.kv_bytes_per_token
    logits = model.vocab_size * model.hidden_size
    all_reduces = 2 * model.num_layers if num_gpus > 1 else 0
    sent_bytes = 2 * (num_gpus - 1) / num_gpus * ELEMENT_BYTES * model.hidden_size
    stored_bytes = ELEMENT_BYTES * (model.num_parameters + 2 * logits)
    capacity = num_gpus * (MEMORY_SHARE * gpu.memory_bytes - ACTIVATION_BYTES) - stored_bytes
    return CostModel(
        name=name,
        description=f"roofline of {model.name} in bfloat16 on {num_gpus} x {gpu.name}; see "
        "docs/simulator.md",
        kv_bytes_per_token=kv_bytes,
        kv_cache_bytes=int(capacity),
        compute=StepTerms(
            per_token_s=2 * model.num_parameters / flops,
            per_attended_s=4 * model.num_layers * model.num_heads * model.head_size / flops,
            per_sample_s=2 * logits / flops,
        ),
        memory=StepTerms(
            per_step_s=model.weight_bytes / bandwidth,
            per_context_s=kv_bytes / bandwidth,
            per_token_s=kv_bytes / bandwidth,
        ),
        overhead=StepTerms(
            per_step_s=STEP_S + all_reduces * ALL_REDUCE_S,
            per_token_s=all_reduces * sent_bytes / gpu.link_bandwidth,
            per_row_s=ROW_S,
        ),
        host=HOST,
        transfers=TransferRates(
            load_bytes_per_s=num_gpus * gpu.host_bandwidth,
            store_bytes_per_s=num_gpus * gpu.host_bandwidth,
            pull_bytes_per_s=num_gpus * gpu.network_bandwidth,
        ),
    )


ROOFLINES: Final = {
    model.name: model
    for model in (
        roofline("h100-llama-8b", H100, LLAMA_8B),
        roofline("h200-llama-8b", H200, LLAMA_8B),
        roofline("h100x2-qwen-32b", H100, QWEN_32B, num_gpus=2),
        roofline("h200-qwen-32b", H200, QWEN_32B),
    )
}
