"""`longshore quantize`: from a folder to a folder that is served."""

import re
import shutil
from pathlib import Path

import pytest

from longshore.deploy.cli.client_options import QuantizeOptions
from longshore.deploy.cli.quantize import run
from longshore.deploy.llm import perplexity
from longshore.deploy.llm.llm import LLM
from longshore.deploy.model.demo import DEMO_MODEL_DIR
from longshore.protocol.errors import ConfigError
from tests.gguf.cases import FILES

TEXT = "The bird sat on the quay and looked at the ships. " * 20


@pytest.mark.slow
def test_a_copy_is_written_and_predicts_a_text_as_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = tmp_path / "text", tmp_path / "new" / "out"
    text.write_text(TEXT)
    run(str(DEMO_MODEL_DIR), QuantizeOptions(to="int8", out=out, text=text))
    printed = capsys.readouterr().out
    assert "21 matrices in int8" in printed
    found = re.search(r"perplexity of .* tokens: ([\d.]+) before, ([\d.]+) after", printed)
    assert found is not None
    before, after = map(float, found.groups())
    assert after == pytest.approx(before, rel=0.05)
    assert list(out.parent.iterdir()) == [out]
    with LLM(out) as llm:
        assert llm.generate(["The bird"], use_tqdm=False)[0].outputs[0].text


def test_perplexity_is_that_of_the_probabilities_of_the_tokens() -> None:
    with LLM(DEMO_MODEL_DIR, in_process=True, num_blocks=200, dtype="float32") as llm:
        tokens = perplexity.text_tokens(llm, TEXT, 40)
        uniform = list(range(40))
        assert 1 < perplexity.perplexity(llm, tokens) < perplexity.perplexity(llm, uniform)
        with pytest.raises(ConfigError, match="fewer than two tokens"):
            perplexity.text_tokens(llm, "")


def test_what_cannot_be_quantised_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="is a GGUF file"):
        run(str(FILES / "qwen2.gguf"), QuantizeOptions(out=out))
    quantised = Path(__file__).parents[2] / "worker/loading/quantised/llama-gptq"
    model = shutil.copytree(quantised, tmp_path / "model")
    for path in DEMO_MODEL_DIR.glob("tokenizer*"):
        shutil.copy(path, model)
    with pytest.raises(ConfigError, match=r"quantised already \(gptq\)"):
        run(str(model), QuantizeOptions(out=out))
    assert not out.exists()
    out.mkdir()
    (out / "other").touch()
    with pytest.raises(ConfigError, match="not an empty folder"):
        run(str(DEMO_MODEL_DIR), QuantizeOptions(out=out))
