"""Models divided among ranks: the same tokens, and each rank holds only its part."""

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from longshore.worker.errors import BrokenCheckpoint, UnsupportedModel
from longshore.worker.models.families import read_model_config
from longshore.worker.models.registry import MODELS
from longshore.worker.ranks.parallel import Parallel
from tests.models import make_tiny_llama, make_tiny_model
from tests.reference import assert_greedy_equal
from tests.worker.models.cases import Case
from tests.worker.models.conftest import NUM_TOKENS, Checkpoint, every_case, every_family
from tests.worker.models.gloo_pair import GlooPair
from tests.worker.models.paged_model import PagedModel, forward_logits, greedy
from tests.worker.models.thread_ranks import on_every_rank

CheckpointOf = Callable[[Case], Checkpoint]


@pytest.fixture(scope="session")
def gloo_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GlooPair]:
    pair = GlooPair(lambda: tmp_path_factory.mktemp("gloo"))
    yield pair
    pair.close()


@every_family
def test_two_processes_give_the_tokens_of_transformers(
    case: Case, gloo_pair: GlooPair, checkpoint_of: CheckpointOf
) -> None:
    checkpoint = checkpoint_of(case)
    for answers in gloo_pair.answers(checkpoint):
        assert_greedy_equal(answers, checkpoint.answers)


@every_family
def test_two_pipeline_stages_give_the_tokens_of_transformers(
    case: Case, checkpoint_of: CheckpointOf
) -> None:
    checkpoint = checkpoint_of(case)
    stages = [
        PagedModel(
            checkpoint.path,
            max_model_len=case.max_model_len,
            parallel=Parallel(stage=stage, num_stages=2),
        )
        for stage in range(2)
    ]
    counts = [len(stage.model.layers) for stage in stages]
    assert min(counts) > 0
    assert sum(counts) == checkpoint.reference.config.num_hidden_layers
    answers = [greedy(stages, prompt, NUM_TOKENS) for prompt in checkpoint.prompts]
    assert_greedy_equal(answers, checkpoint.answers)


@pytest.mark.parametrize(
    ("num_shards", "num_stages"), [(2, 1), (4, 1), (2, 2)], ids=["2 shards", "4", "2 by 2"]
)
@every_case
def test_logits_of_every_shard_equal_those_of_transformers(
    case: Case, num_shards: int, num_stages: int, checkpoint_of: CheckpointOf
) -> None:
    """Four shards over two KV heads or one hold copies of them."""
    checkpoint = checkpoint_of(case)
    prompt = checkpoint.prompts[0]

    def run(places: list[Parallel]) -> torch.Tensor:
        stages = [
            PagedModel(checkpoint.path, max_model_len=case.max_model_len, parallel=place)
            for place in places
        ]
        return forward_logits(stages, prompt)

    exact = copy.deepcopy(checkpoint.reference).double()  # without transformers' rounding
    with torch.inference_mode():
        wanted = exact(torch.tensor([prompt])).logits[0].float()
    for got in on_every_rank(num_shards, num_stages, run):
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)


HELD_BY_ALL = (
    "norm.weight",
    "norm_f.weight",
    ".gate.weight",
    "shared_expert_gate.weight",
    ".router.weight",
    ".router.layer.weight",
    ".router.bias",
    "correction_bias",
    "expert_bias",
    "latent_proj.weight",
    "latent_proj.bias",
    "q_a_proj.weight",
    "q_a_proj.bias",
    "kv_a_proj_with_mqa.weight",
    "kv_a_proj_with_mqa.bias",
)
COPIED = (
    *HELD_BY_ALL,
    "k_proj.weight",
    "k_proj.bias",
    "v_proj.weight",
    "v_proj.bias",
    "in_proj.weight",
    "in_proj.bias",
    "in_proj_qkvz.weight",
    "in_proj_qkv.weight",
    "conv1d.weight",
    "conv1d.bias",
)


@every_case
def test_a_shard_holds_its_part_of_every_matrix(case: Case, checkpoint_of: CheckpointOf) -> None:
    """Every shard holds norms, routers and the projections to latents. A KV head (or the maps of a
    group of Mamba heads) is copied to the shards that read it; nothing else is held twice."""
    checkpoint = checkpoint_of(case)

    def sizes(places: list[Parallel]) -> dict[str, int]:
        config = read_model_config(checkpoint.path)
        model = MODELS[type(config)](
            config,
            max_model_len=case.max_model_len,
            dtype=torch.float32,
            device=torch.device("cpu"),
            parallel=places[0],
        )  # not loaded, because loading may change the layout of matrices
        return {
            name: sum(place.numel() for place, _ in stored.parts)
            for name, stored in model.checkpoint_tensors().items()
        }

    (alone,) = on_every_rank(1, 1, sizes)
    shards = on_every_rank(2, 1, sizes)
    for name, size in alone.items():
        has_copies = case.settings.get("num_key_value_heads") == 1
        if not name.endswith(COPIED if has_copies else HELD_BY_ALL):
            assert sum(shard[name] for shard in shards) == size, name


def test_what_cannot_be_cut_evenly_is_rejected_by_name(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path, intermediate_size=90)
    config = read_model_config(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"num_attention_heads=4, num_key_value_heads=2 of"):
        config.check_split(num_shards=3)
    with pytest.raises(UnsupportedModel, match=r"size=4 cannot cut intermediate_size=90"):
        PagedModel(tmp_path, parallel=Parallel(num_shards=4))
    with pytest.raises(UnsupportedModel, match=r"pipeline_parallel_size=3 .* 2 layers"):
        PagedModel(tmp_path, parallel=Parallel(num_stages=3))


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_takes_a_checkpoint_with_a_tied_head_in_it(stage: int, tmp_path: Path) -> None:
    reference = make_tiny_model("Qwen2", tmp_path, tie_word_embeddings=True)
    model = PagedModel(tmp_path, parallel=Parallel(stage=stage, num_stages=2)).model
    assert model.embedding is not None
    torch.testing.assert_close(model.embedding.weight, reference.model.embed_tokens.weight)
    assert (model.head is None) == (stage == 0)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_tensor_that_no_stage_has_a_place_for_is_rejected(stage: int, tmp_path: Path) -> None:
    make_tiny_llama(tmp_path, num_hidden_layers=3)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    with pytest.raises(UnsupportedModel, match=r"model\.layers\.2\..*, which this model"):
        PagedModel(tmp_path, parallel=Parallel(stage=stage, num_stages=2))


def test_a_stage_whose_layers_are_missing_is_rejected(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path, num_hidden_layers=4)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({n: t for n, t in tensors.items() if not n.startswith("model.layers.2.")}, file)
    PagedModel(tmp_path, parallel=Parallel(stage=0, num_stages=2))
    with pytest.raises(BrokenCheckpoint, match=r"lacks model\.layers\.2"):
        PagedModel(tmp_path, parallel=Parallel(stage=1, num_stages=2))
