"""How many kernels a step launches on a GPU, and how much memory its intermediate tensors need.

    python benchmarks/kernels_per_step.py [--models NAME ...] [--layers N] [--json F]

Needs no GPU: the model runner computes steps of models of real size on the fake device of the
tests, whose tensors have no memory. A kernel is an operation of torch that is not a view, or a
launch that one of our operators declares. An operation of torch counts once, although some of them
launch several kernels. Copies between host and device are counted separately.

Steps, in bfloat16 and with greedy sampling: decodes of 1 and of 256 rows, and the last 8,192 tokens
of a prompt of 24,576, the others of which are cached. `kernels` are those of the whole step,
`per_layer` those of the layers, divided by their number. `peak_mib` is the most memory of tensors
that the step has made and not yet freed. On a GPU a decode step is one CUDA graph of these kernels.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import report

sys.path.insert(0, str(report.ROOT))

from tests.worker.fake_device import Counts, FakeDevice, fake_device
from tests.worker.models.served_model import ServedModel

NUM_ROWS: Final = 256
CHUNK: Final = 8192
PROMPT: Final = 3 * CHUNK
NUM_DECODES: Final = 4
"""Output tokens of a request; enough for both decode steps."""

COMMON: Final[dict[str, Any]] = {"max_position_embeddings": 131_072, "rms_norm_eps": 1e-5}
SHAPES: Final[dict[str, dict[str, Any]]] = {
    "Llama 3 8B": {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "Qwen3 32B": {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151_936,
        "hidden_size": 5120,
        "intermediate_size": 25_600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "Qwen3 0.6B": {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "gpt-oss 20B": {
        "architectures": ["GptOssForCausalLM"],
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "attention_bias": True,
        "swiglu_limit": 7.0,
    },
    "Mixtral 8x7B": {
        "architectures": ["MixtralForCausalLM"],
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "DeepSeek-V2-Lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "vocab_size": 102_400,
        "hidden_size": 2048,
        "intermediate_size": 10_944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    },
    "Gemma 3 12B": {
        "architectures": ["Gemma3ForCausalLM"],
        "vocab_size": 262_208,
        "hidden_size": 3840,
        "intermediate_size": 15_360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
    },
    "Bamba 9B": {
        "architectures": ["BambaForCausalLM"],
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "attn_layer_indices": [9, 18, 27],
        "mamba_n_heads": 128,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
    },
}


class Steps:
    """One model on the fake device; a request at a time, or NUM_ROWS."""

    def __init__(self, device: FakeDevice, folder: Path) -> None:
        self._device = device
        self._served = ServedModel(
            folder,
            num_tokens=NUM_DECODES,
            num_blocks=200_000,
            max_model_len=PROMPT + NUM_DECODES,
            max_num_seqs=NUM_ROWS,
            max_num_batched_tokens=CHUNK,
            max_steps_in_flight=1,
            enable_prefix_caching=False,
            device="cuda",
            load_format="dummy",
            dtype="bfloat16",
            enforce_eager=True,
            poison_kv=False,
        )
        self._model = self._served.worker.model
        self._run_layers = self._model.run_layers
        self._model.run_layers = self._counting_layers  # type: ignore[method-assign]
        self._of_layers = Counts()

    def rows(self) -> list[dict[str, Any]]:
        served = self._served
        served.add([3] * PROMPT)
        served.step()
        served.step()
        chunk = self._measured("8k after 16k cached")
        while served.step():
            pass
        served.add([3])
        served.step()
        one = self._measured("decode of 1")
        for _ in range(NUM_ROWS - 1):
            served.add([3])
        served.step()
        return [one, self._measured(f"decode of {NUM_ROWS}"), chunk]

    def _measured(self, name: str) -> dict[str, Any]:
        with self._device.counting() as counts:
            self._served.step()
        num_layers = self._model.config.num_layers
        return {
            "step": name,
            "kernels": counts.num_kernels,
            "per_layer": round(self._of_layers.num_kernels / num_layers, 1),
            "copies": counts.num_copies,
            "peak_mib": round(counts.peak_bytes / 2**20, 1),
        }

    def _counting_layers(self, *inputs: Any) -> Any:
        with self._device.counting() as self._of_layers:
            return self._run_layers(*inputs)


def measure(name: str, num_layers: int | None) -> list[dict[str, Any]]:
    fields = COMMON | SHAPES[name]
    if num_layers is not None:
        fields["num_hidden_layers"] = num_layers
    with tempfile.TemporaryDirectory() as folder, fake_device() as device:
        (Path(folder) / "config.json").write_text(json.dumps(fields))
        return [{"model": name, **row} for row in Steps(device, Path(folder)).rows()]


def main() -> None:
    arguments = report.parser(__doc__)
    arguments.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    arguments.add_argument("--layers", type=int, metavar="N", help="default: all of a model")
    options = arguments.parse_args()
    rows = [row for name in options.models for row in measure(name, options.layers)]
    report.write(options.json, rows)


if __name__ == "__main__":
    main()
