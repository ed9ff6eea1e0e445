"""The file with the models of one server."""

from pathlib import Path

import pytest

from longshore.deploy.settings.models_file import check_common_settings, read_models_file
from longshore.deploy.settings.options import ServeOptions
from longshore.protocol.errors import ConfigError

OPTIONS = ServeOptions(num_blocks=100, max_num_seqs=4)


def read(tmp_path: Path, text: str) -> list[tuple[Path, ServeOptions]]:
    file = tmp_path / "models.toml"
    file.write_text(text)
    return read_models_file(file, OPTIONS)


def test_each_model_has_its_settings_and_those_of_the_command_line(tmp_path: Path) -> None:
    (first, one), (second, other) = read(
        tmp_path,
        """
        [[models]]
        model = "smollm2-135m-instruct"
        served_model_name = ["chat", "small"]
        num_blocks = 2000
        tool_call_parser = "hermes"
        kv_connector = "offloading"
        kv_connector_config = {cpu_bytes_to_use = "1MiB"}

        [[models]]
        model = "/models/embedder"
        replicas = 2
        chat_template = "chat.jinja"
        """,
    )
    assert (first, second) == (Path("smollm2-135m-instruct"), Path("/models/embedder"))
    assert (one.num_blocks, one.max_num_seqs, one.replicas) == (2000, 4, 1)
    assert (one.served_model_name, one.tool_call_parser) == (("chat", "small"), "hermes")
    assert one.kv_connector_config == '{"cpu_bytes_to_use":"1MiB"}'
    assert (other.num_blocks, other.max_num_seqs, other.replicas) == (100, 4, 2)
    assert other.chat_template == Path("chat.jinja")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("num_blocks = 3", r"models\[0\]\.model is missing or no text"),
        ("model = 3", r"models\[0\]\.model is missing or no text"),
        (
            "model = 'a'\nport = 3",
            r"models\[0\]\.port cannot be set here: it is the same for all models",
        ),
        ("model = 'a'\nprefill = 1", r"models\[0\]\.prefill cannot be set here"),
        ("model = 'a'\nnum_block = 3", r"num_block is not a setting; did you mean num_blocks\?"),
        ("model = 'a'\nnum_blocks = 'x'", r"models\[0\]\.num_blocks: Expected `int"),
        ("model = 'a'\nmax_num_seqs = 0", r"models\[0\]: max_num_seqs=0 must be"),
    ],
)
def test_a_wrong_table_is_rejected_by_its_key(tmp_path: Path, table: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, f"[[models]]\n{table}\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"Object missing required field `models`"),
        ("models = []", "length >= 1"),
        ("models = 1\n", "models: Expected `array`"),
        ("[[models]", "is not valid TOML"),
        ("[[models]]\nmodel='a'\n[other]", "unknown field `other`"),
    ],
)
def test_a_wrong_file_is_rejected(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, text)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_models_file(tmp_path / "none.toml", OPTIONS)


def test_a_flag_that_only_one_model_can_have_is_rejected_for_several() -> None:
    named = ServeOptions(served_model_name=("a",))
    check_common_settings([Path("a")], named)
    with pytest.raises(ConfigError, match="served_model_name is a setting of one model, and 2"):
        check_common_settings([Path("a"), Path("b")], named)


def test_models_sleep_with_one_gateway_only() -> None:
    with pytest.raises(ConfigError, match="idle_sleep_s=60 needs one gateway"):
        ServeOptions(idle_sleep_s=60, gateways=2)
