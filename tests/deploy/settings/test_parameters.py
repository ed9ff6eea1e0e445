"""Every setting of the command line is a Setting, and becomes one parameter of cyclopts."""

from collections import Counter
from dataclasses import dataclass, fields
from typing import Annotated, get_type_hints

import pytest
from cyclopts import App, Parameter

from longshore.deploy.settings.options import EngineOptions, ServeOptions
from longshore.deploy.settings.parameters import with_parameters
from longshore.protocol.settings import Setting, Settings


@dataclass(frozen=True, kw_only=True)
class PoolSettings(Settings):
    num_tokens: Annotated[
        int, Setting("KV cache", "Tokens of the pool.", alias="-n", is_count=True)
    ] = 1000


@with_parameters
@dataclass(frozen=True, kw_only=True)
class Options(PoolSettings):
    port: Annotated[int, Setting("Server", "Port to listen on.")] = 80


@pytest.mark.parametrize("flag", ["--num-tokens", "-n"])
def test_flags_and_help_are_those_of_the_setting(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    app = App(name="pool")
    options = Options()

    @app.default
    def run(*, given: Annotated[Options, Parameter(name="*")] = options) -> Options:
        return given

    assert app([flag, "32K", "--port", "81"], result_action="return_value") == Options(
        num_tokens=32 * 1024, port=81
    )
    app(["--help"], result_action="return_value")
    text = capsys.readouterr().out
    assert text.index("Server") < text.index("KV cache")
    assert "Tokens of the pool. [default: 1000]" in text


@pytest.mark.parametrize("options", [EngineOptions, ServeOptions])
def test_every_field_is_one_setting_with_one_parameter(options: type[Settings]) -> None:
    hints = get_type_hints(options, include_extras=True)
    for field in fields(options):
        kinds = [type(mark) for mark in hints[field.name].__metadata__]
        assert kinds.count(Setting) == 1, field.name
        assert kinds.count(Parameter) == 1, field.name


def test_every_setting_is_stated_by_one_class() -> None:
    names = {field.name for field in fields(ServeOptions)}
    stated = Counter(name for kind in ServeOptions.__mro__ for name in vars(kind).keys() & names)
    assert stated == Counter(names)
