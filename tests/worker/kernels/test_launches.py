"""How many kernels a decode step launches on a GPU: torch's operations, views excepted, and the
declared launches of our operators. Models have their real shapes, and tensors without memory."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from longshore.protocol.kv_cache_spec import CrossAttentionSpec, KVCacheConfig
from longshore.worker.attention.grouped import GroupedAttention
from longshore.worker.attention.metadata import AttentionMetadata
from longshore.worker.kernels.argmax import argmax
from longshore.worker.kernels.operators import NAMESPACE, interpreted, num_launches
from longshore.worker.kv_cache.buffer import KVCache
from longshore.worker.kv_cache.plan import CacheSizes, plan_groups
from longshore.worker.models.families import read_model_config
from longshore.worker.models.registry import MODELS
from longshore.worker.process.device import dtype_name

DTYPE = torch.bfloat16
CPU = torch.device("cpu")
NO_KERNELS = ("empty", "new_empty", "detach", "lift_fresh")
NUM_ROWS, MAX_LEN, BLOCK_SIZE = 8, 1024, 16

DENSE: dict[str, Any] = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}


class Launches(TorchDispatchMode):
    """Counts kernels by name."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func.name().partition("::")
        if namespace == NAMESPACE:
            self.kernels[name] += num_launches(name)
        elif not func.is_view and namespace == "aten" and not name.startswith(NO_KERNELS):
            self.kernels[name] += 1
        return func(*args, **(kwargs or {}))


def launches(folder: Path, family: str, num_layers: int, **settings: Any) -> Counter[str]:
    """Of a decode step, from token ids to sampled ones."""
    config_json = {
        "architectures": [f"{family}ForCausalLM"],
        **DENSE,
        "num_hidden_layers": num_layers,
        **settings,
    }
    if "layer_types" in settings:
        config_json["layer_types"] = [settings["layer_types"]] * num_layers
    (folder / "config.json").write_text(json.dumps(config_json))
    config = read_model_config(folder)
    with FakeTensorMode(), interpreted(), torch.no_grad():
        model = MODELS[type(config)](config, max_model_len=MAX_LEN, dtype=DTYPE, device=CPU)
        sizes = CacheSizes(block_size=BLOCK_SIZE, dtype_bytes=DTYPE.itemsize, num_shards=1)
        groups = plan_groups(
            config.cache_specs(sizes), max_model_len=MAX_LEN, max_num_batched_tokens=MAX_LEN
        )
        cache = KVCache(KVCacheConfig(100, groups, dtype_name(DTYPE)), dtype=DTYPE, device=CPU)
        attention = GroupedAttention(cache, model.cached_layers())
        numbers, token_ids = torch.zeros(NUM_ROWS, dtype=torch.int64), torch.zeros(NUM_ROWS).int()
        with Launches() as launched:
            step = attention.begin_step(
                [
                    AttentionMetadata(
                        slot_mapping=numbers[:0]
                        if isinstance(group.spec, CrossAttentionSpec)
                        else numbers,
                        block_table=torch.zeros(NUM_ROWS, 64, dtype=torch.int32),
                        decode_rows=numbers,
                        decode_lens=numbers,
                        decode_segments=(),
                        prefill_chunks=(),
                    )
                    for group in groups
                ]
            )
            launched.kernels.clear()
            hidden = model.forward(token_ids, numbers, step)
            argmax(model.logits(hidden))
        return launched.kernels


def test_a_layer_of_llama_3_8b_launches_10_kernels(tmp_path: Path) -> None:
    one, two = (launches(tmp_path, "Llama", num_layers) for num_layers in (1, 2))
    layer = two - one
    assert layer == {"rms_norm": 2, "mm": 4, "write_kv": 1, "decode_attention": 2, "gate": 1}
    assert layer.total() <= 10
    rest = {"embedding": 1, "add_.Tensor": 1, "rms_norm": 1, "mm": 1, "logits": 1, "argmax": 2}
    assert one - layer == rest


LATENT: dict[str, Any] = {
    "num_key_value_heads": 32,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 2,
}


@pytest.mark.parametrize(
    ("family", "settings", "num_kernels"),
    [
        ("Qwen3", {"head_dim": 128}, 10),
        ("Olmo2", {}, 11),
        ("Gemma2", {"head_dim": 256}, 11),
        ("DeepseekV3", LATENT, 14),
        ("Qwen3_5", {"layer_types": "linear_attention"}, 10),
        ("Qwen3_5", {"layer_types": "full_attention"}, 12),
        ("Lfm2", {"layer_types": "conv"}, 11),
        ("NemotronH", {"layer_types": "linear_attention"}, 6),
        ("FalconH1", {}, 25),
    ],
)
def test_layers_of_other_families_launch_few_kernels(
    tmp_path: Path, family: str, settings: dict[str, Any], num_kernels: int
) -> None:
    one, two = (launches(tmp_path, family, num_layers, **settings) for num_layers in (1, 2))
    assert two.total() - one.total() == num_kernels
