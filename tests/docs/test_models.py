"""The example of docs/models.md, installed as a reader would install it."""

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from longshore.worker.errors import UnsupportedModel
from longshore.worker.loading.quantization_config import METHODS
from longshore.worker.models.families import ARCHITECTURES, ENCODERS, read_model_config
from tests.conftest import ROOT
from tests.docs.installing import installed_example
from tests.models import make_tiny_model
from tests.worker.models.paged_model import PagedModel, forward_logits
from tests.worker.models.thread_ranks import on_every_rank

PAGE = ROOT / "docs" / "models.md"
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.6,
    "logits_scaling": 0.5,
}


@pytest.fixture
def installed(tmp_path: Path) -> Iterator[Path]:
    with installed_example(PAGE, tmp_path) as folder:
        yield folder


@pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (1, 2), (2, 2)], ids=str)
def test_example_gives_the_logits_of_transformers_on_any_number_of_ranks(
    ranks: tuple[int, int], installed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    reference = make_tiny_model("Granite", folder, initializer_range=0.2, **MULTIPLIERS)
    prompt = list(range(3, 70))
    with torch.inference_mode():
        wanted = copy.deepcopy(reference).double()(torch.tensor([prompt])).logits[0].float()
    assert wanted.std() > 0.1, "a flat reference would prove nothing"
    for got in on_every_rank(
        *ranks,
        lambda places: forward_logits([PagedModel(folder, parallel=p) for p in places], prompt),
    ):
        torch.testing.assert_close(got, wanted, atol=2e-4, rtol=0)


def test_an_installed_family_is_named_among_those_supported(
    installed: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["UnknownForCausalLM"]}))
    with pytest.raises(UnsupportedModel, match=r"UnknownForCausalLM .*GraniteForCausalLM, .*Llama"):
        read_model_config(tmp_path)


def test_an_entry_point_that_leads_elsewhere_is_rejected(installed: Path, tmp_path: Path) -> None:
    (points,) = installed.glob("*.dist-info/entry_points.txt")
    points.write_text("[longshore.models]\nGraniteForCausalLM = granite_config:MULTIPLIERS\n")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GraniteForCausalLM"]}))
    with pytest.raises(UnsupportedModel, match="not a subclass of DecoderConfig"):
        read_model_config(tmp_path)


def test_the_page_has_the_quantisation_methods_that_are_read() -> None:
    section = PAGE.read_text().partition("## Quantised weights")[2].partition("\n## ")[0]
    found = re.findall(r"^\| `(\S+)` \| \w", section, re.MULTILINE)
    assert sorted(found) == sorted(("quant_method", *METHODS))


def test_the_page_s_table_has_the_architectures_that_are_read_and_no_others() -> None:
    columns = [line.split("|")[2] for line in PAGE.read_text().splitlines() if line[:2] == "| "]
    named = [name for column in columns for name in re.findall("`(.+?)`", column)]
    assert sorted(named) == sorted(ARCHITECTURES | ENCODERS)
