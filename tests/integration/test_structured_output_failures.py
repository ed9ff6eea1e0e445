"""Structured output while a process dies or hangs: the worker, the scheduler, or the grammar
process."""

import contextlib
import json
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import openai
import psutil
import pytest

from longshore.deploy.model.demo import DEMO_MODEL_DIR
from longshore.scheduler.process.structured_output.client import MODULE
from tests.integration.conftest import StartDeployment
from tests.integration.deployment import PATIENCE_S, Deployment, wait_until

LINES = re.compile("([a-z]{3} [0-9]{2},){12}")
ITEM: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "size": {"enum": [1, 2.5, None]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
ITEMS = {"type": "array", "items": ITEM, "minItems": 4, "maxItems": 4}

DEADLY = f"""
import os, signal, sys
if {MODULE!r} in sys.orig_argv:
    from longshore.scheduler.process.structured_output.backends import Backends
    compile = Backends.compile
    def deadly(self, spec):
        if "deadly" in spec.text:
            os.kill(os.getpid(), signal.SIGSEGV)
        return compile(self, spec)
    Backends.compile = deadly
"""
"""Ends the grammar process whenever it compiles what contains `deadly`."""


class Stream:
    """A completion, requested and read in a thread."""

    def __init__(
        self, client: openai.OpenAI, seed: int, *, temperature: float = 1.0, **constraint: Any
    ) -> None:
        self.text = ""
        self.finish_reason: str | None = None
        self.error: openai.APIError | None = None
        self._request: dict[str, Any] = {
            "prompt": f"Once {seed} " * 20,
            "seed": seed,
            "temperature": temperature,
            "max_tokens": 700 if constraint else 100,
            "extra_body": constraint or {"ignore_eos": True},
        }
        self._client = client
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            for chunk in self._client.completions.create(
                model="demo_model", stream=True, **self._request
            ):
                self.text += chunk.choices[0].text
                self.finish_reason = chunk.choices[0].finish_reason or self.finish_reason
        except openai.APIError as error:
            self.error = error

    def end(self) -> "Stream":
        self._thread.join(PATIENCE_S * 3)
        assert not self._thread.is_alive()
        return self


def client_of(deployment: Deployment) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{deployment.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S * 3
    )


def streams_of(client: openai.OpenAI) -> list[Stream]:
    return [
        Stream(client, 1, guided_regex=LINES.pattern),
        Stream(client, 2),
        Stream(client, 3, guided_json=ITEMS),
    ]


def wait_until_begun(streams: list[Stream]) -> None:
    wait_until(lambda: all(stream.text or stream.error for stream in streams), PATIENCE_S * 2)


def grammar_process(deployment: Deployment) -> psutil.Process:
    for child in deployment.members["scheduler"].children():
        with contextlib.suppress(psutil.Error):  # one that has just ended
            if MODULE in child.cmdline():
                return child
    raise AssertionError("the scheduler has no grammar process")


def kill_worker(deployment: Deployment) -> None:
    deployment.members["worker-0"].send_signal(signal.SIGKILL)


def kill_scheduler(deployment: Deployment) -> None:
    process = grammar_process(deployment)
    deployment.members["scheduler"].send_signal(signal.SIGKILL)
    process.wait(PATIENCE_S)  # it ends with its scheduler


@pytest.mark.slow
@pytest.mark.req("FEA-01")
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param((), id="one rank"),
        pytest.param(
            ("--tensor-parallel-size", "2"),
            id="two ranks",
            # Two ranks that wait for masks share the processors with everything else.
            marks=[pytest.mark.long, pytest.mark.timeout(900)],
        ),
    ],
)
def test_answers_continue_as_their_grammar_says_after_a_death(
    flags: tuple[str, ...], start_deployment: StartDeployment
) -> None:
    deployment = start_deployment(
        "--dtype", "float32", "--verify-plan", *flags, model_dir=DEMO_MODEL_DIR
    ).wait_until_ready()
    kills: list[Callable[[Deployment], None]] = [kill_worker, kill_scheduler]
    with client_of(deployment) as client:
        undisturbed = [stream.end().text for stream in streams_of(client)]
        for kill in kills:
            deployment.find_members()
            streams = streams_of(client)
            wait_until_begun(streams)
            kill(deployment)
            assert [stream.end().error for stream in streams] == [None] * 3
            assert [stream.text for stream in streams] == undisturbed
    lines, _, items = streams
    assert [lines.finish_reason, items.finish_reason] == ["stop", "stop"]
    assert LINES.fullmatch(lines.text)
    jsonschema.validate(json.loads(items.text), ITEMS)


def kill_grammars(deployment: Deployment) -> None:
    grammar_process(deployment).kill()


def stop_grammars(deployment: Deployment) -> None:
    grammar_process(deployment).suspend()


@pytest.mark.slow
@pytest.mark.req("FEA-01", "OUT-05")
def test_streams_go_on_from_their_tokens_when_the_grammar_process_dies_or_hangs(
    start_deployment: StartDeployment,
) -> None:
    """Streams with several grammars, greedy and seeded, beside plain ones."""
    deployment = start_deployment(
        "--dtype", "float32", "--verify-plan", model_dir=DEMO_MODEL_DIR
    ).wait_until_ready()
    with client_of(deployment) as client:

        def begin() -> list[Stream]:
            return [
                *streams_of(client),
                Stream(client, 4, temperature=0.0, guided_regex=LINES.pattern),
                Stream(client, 5, temperature=0.0),
                Stream(client, 6, guided_regex="([a-f]{5} ){20}"),
            ]

        undisturbed = [stream.end().text for stream in begin()]
        deployment.find_members()
        for disturb in (kill_grammars, stop_grammars):
            process = grammar_process(deployment)
            streams = begin()
            wait_until_begun(streams)
            disturb(deployment)
            assert [stream.end().error for stream in streams] == [None] * len(streams)
            assert [stream.text for stream in streams] == undisturbed
            assert grammar_process(deployment).pid != process.pid
    assert deployment.stop() == 0
    deployment.assert_nothing_is_left()


@pytest.mark.slow
def test_a_grammar_that_ends_its_process_fails_alone(
    start_deployment: StartDeployment, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(DEADLY)
    deployment = start_deployment(
        "--dtype", "float32", model_dir=DEMO_MODEL_DIR, environment={"PYTHONPATH": str(tmp_path)}
    ).wait_until_ready()
    with client_of(deployment) as client:
        calm = [stream.end().text for stream in streams_of(client)]
        streams = streams_of(client)
        wait_until_begun(streams)
        deadly = Stream(client, 9, guided_regex="(deadly){9}").end()
        assert isinstance(deadly.error, openai.BadRequestError)
        assert "while it worked on this regex, twice" in str(deadly.error)
        assert [stream.end().error for stream in streams] == [None] * 3
        assert [stream.text for stream in streams] == calm
        again = Stream(client, 9, guided_regex="(deadly){9}").end()
        assert isinstance(again.error, openai.BadRequestError)
    assert deployment.stop() == 0
    deployment.assert_nothing_is_left()
