"""One engine encodes a sound, and another loads its output: the texts are equal, and the second
engine does not run its encoder, except where the output cannot be loaded."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from longshore import LLM, SamplingParams
from longshore.connectors.pull.transport import ReadState
from longshore.connectors.pull_encoder import worker as worker_half
from longshore.connectors.pull_encoder.worker import PullEncoderWorker
from longshore.deploy.llm.in_process_engine import InProcessEngine
from longshore.deploy.requests.audio import Samples
from longshore.protocol.errors import ConfigError
from tests.connectors.pull.local import Network
from tests.connectors.pull_encoder.local import network
from tests.deploy.sounds import tone
from tests.deploy.tiny_whisper import SAMPLING_RATE, make_tiny_whisper

LOCAL: Final = "tests.connectors.pull_encoder.local:LocalEncoderConnector"
SETTINGS: Final[dict[str, Any]] = {
    "num_blocks": 200,
    "max_num_seqs": 4,
    "threads": 1,
    "block_size": 16,
    "in_process": True,
}
ON_HOST: Final[dict[str, Any]] = {"cpu_bytes_to_use": "16MiB"}
GREEDY: Final = SamplingParams(temperature=0, max_tokens=8)
SOUNDS: Final = [tone(0.3 + 0.3 * n, 200.0 + 300 * n, noise=0.02 * n, seed=n) for n in range(3)]

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def fresh_network() -> None:
    network.__dict__.update(Network().__dict__)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whisper")
    make_tiny_whisper(path)
    return path


class Speech:
    """An engine in this process. num_encoded: runs of its encoder, as the model sees them."""

    def __init__(self, model: Path, role: str | None = None, **options: Any) -> None:
        settings = dict(SETTINGS)
        if role is not None:
            config = json.dumps({"lease_s": 1.0} | options)
            settings |= {"ec_connector": LOCAL, "ec_role": role, "ec_connector_config": config}
        self.llm = LLM(model, **settings)
        engine = self.llm._engine
        assert isinstance(engine, InProcessEngine)
        self.engine = engine
        self.num_encoded = 0
        encode = engine.worker.model.encode

        def counted(samples: Any) -> Any:
            self.num_encoded += 1
            return encode(samples)

        engine.worker.model.encode = counted  # type: ignore[method-assign]

    def __enter__(self) -> "Speech":
        return self

    def __exit__(self, *_: object) -> None:
        self.llm.close()

    @property
    def peer(self) -> str:
        half = self.engine.encoder_halves[1]
        assert isinstance(half, PullEncoderWorker)
        return f"127.0.0.1:{half.port}"

    def run(self, *sounds: Samples) -> list[str]:
        """The texts of English sounds, whose language is not detected."""
        audios = [(sound, SAMPLING_RATE) for sound in sounds]
        outputs = self.llm.transcribe(audios, language="en", sampling_params=GREEDY, use_tqdm=False)
        return [output.text for output in outputs]

    @property
    def counts(self) -> tuple[int, int, int]:
        """Items encoded, loaded and missed, as in the metrics."""
        stats = self.engine.stats()
        assert stats.num_encoded_items == self.num_encoded
        return (
            stats.num_encoded_items,
            stats.num_loaded_encoder_outputs,
            stats.num_missed_encoder_outputs,
        )


@pytest.fixture(scope="module")
def expected(model: Path) -> list[str]:
    with Speech(model) as plain:
        texts = plain.run(*SOUNDS)
        assert plain.counts == (len(SOUNDS), 0, 0)
    assert len(set(texts)) == len(SOUNDS)
    return texts


@pytest.fixture
def producer(model: Path) -> Iterator[Speech]:
    with Speech(model, "ec_producer") as producer:
        yield producer


@pytest.mark.req("FEA-09")
def test_the_second_engine_loads_what_the_first_has_encoded(
    model: Path, producer: Speech, expected: list[str]
) -> None:
    with Speech(model, "ec_consumer", peers=[producer.peer]) as consumer:
        assert producer.run(*SOUNDS) == expected
        assert consumer.run(*SOUNDS) == expected
        assert producer.counts == (3, 0, 0)
        assert consumer.counts == (0, 3, 0)
        assert network.num_posted == 3
        # Again: both have the outputs themselves.
        assert consumer.run(*SOUNDS) == producer.run(*SOUNDS) == expected
        assert producer.counts == (3, 3, 0)
        assert consumer.counts == (0, 6, 0)
        assert network.num_posted == 3


def test_what_no_engine_has_encoded_is_a_miss_and_is_encoded(
    model: Path, producer: Speech, expected: list[str]
) -> None:
    with Speech(model, "ec_both", peers=[producer.peer]) as other:
        producer.run(SOUNDS[0])
        assert other.run(*SOUNDS) == expected
        assert other.counts == (2, 1, 2)
        with Speech(model, "ec_consumer", peers=[producer.peer, other.peer]) as third:
            assert third.run(*SOUNDS) == expected  # the second peer is asked after the first
            assert third.counts == (0, 3, 0)


def test_more_outputs_than_there_is_room_for_are_evicted(model: Path, expected: list[str]) -> None:
    with (
        Speech(model, "ec_producer", max_outputs=2) as producer,
        Speech(model, "ec_consumer", peers=[producer.peer], max_outputs=1) as consumer,
    ):
        for _ in range(3):
            for sound, text in zip(SOUNDS, expected, strict=True):
                assert producer.run(sound) == [text]
                assert consumer.run(sound) == [text]
        num_encoded, num_loaded, _ = consumer.counts
        assert num_encoded + num_loaded == 9
        assert num_loaded > 0


@pytest.mark.parametrize("state", [ReadState.FAILED, ReadState.IN_PROGRESS], ids=["fails", "late"])
def test_a_read_that_fails_or_is_late_costs_nothing_but_the_encoding(
    state: ReadState, model: Path, producer: Speech, expected: list[str]
) -> None:
    network.state = lambda number: state
    options = {"peers": [producer.peer], "read_timeout_s": 0.2}
    with Speech(model, "ec_consumer", **options) as consumer:
        producer.run(*SOUNDS)
        assert consumer.run(*SOUNDS) == expected
        assert consumer.counts == (3, 0, 3)
        network.state = lambda number: ReadState.DONE
        assert consumer.run(*SOUNDS) == expected
        assert consumer.counts == (3, 3, 3)


def test_a_peer_that_does_not_answer_is_not_asked_again_for_a_while(
    model: Path, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_half, "ANSWER_TIMEOUT_S", 0.2)
    monkeypatch.setattr(worker_half, "SILENCE_S", 1000.0)
    with Speech(model, "ec_producer") as gone:
        peer = gone.peer
    with Speech(model, "ec_consumer", peers=[peer]) as consumer:
        assert consumer.run(*SOUNDS) == expected
        assert consumer.counts == (3, 0, 3)
        half = consumer.engine.encoder_halves[1]
        assert isinstance(half, PullEncoderWorker)
        assert half._silent_until[0] > 0
        assert consumer.run(*SOUNDS) == expected
        assert consumer.counts == (6, 0, 6)


def test_outputs_of_another_model_are_not_loaded(
    model: Path, producer: Speech, expected: list[str], tmp_path: Path
) -> None:
    make_tiny_whisper(tmp_path, seed=7)
    with Speech(tmp_path) as plain:
        others = plain.run(*SOUNDS)
    with Speech(tmp_path, "ec_consumer", peers=[producer.peer]) as consumer:
        assert producer.run(*SOUNDS) == expected
        assert consumer.run(*SOUNDS) == others
        assert consumer.counts == (3, 0, 3)


def test_a_secret_must_be_the_same(model: Path, expected: list[str], tmp_path: Path) -> None:
    import zmq

    secrets = []
    for name in "ab":
        secrets.append(tmp_path / name)
        secrets[-1].write_bytes(zmq.curve_keypair()[1])
        secrets[-1].chmod(0o600)
    a, b = map(str, secrets)
    with Speech(model, "ec_producer", secret_file=a) as producer:
        producer.run(*SOUNDS)
        for secret, num_loaded in ((a, 3), (b, 0)):
            options = {"peers": [producer.peer], "secret_file": secret}
            with Speech(model, "ec_consumer", **options) as consumer:
                assert consumer.run(*SOUNDS) == expected
                assert consumer.counts[1] == num_loaded


def test_a_model_without_an_encoder_is_rejected(tmp_path: Path) -> None:
    from longshore.deploy.model.demo import DEMO_MODEL_DIR

    with pytest.raises(ConfigError, match="this model has no encoder"):
        LLM(DEMO_MODEL_DIR, ec_connector=LOCAL, ec_role="ec_producer", **SETTINGS)


@pytest.mark.parametrize("ec_role", [None, "ec_producer"], ids=["alone", "beside an encoder's"])
@pytest.mark.parametrize(
    ("connector", "options", "message"),
    [
        ("tests.connectors.pull.local:LocalConnector", {}, "local: KV cache group 1 has a Cross"),
        ("simple_cpu", ON_HOST, "simple_cpu does not support a CrossAttentionSpec"),
        ("offloading", ON_HOST, "the offloading connector cannot store KV cache group 1, which is"),
        ("hidden_states", {"path": "kv"}, "cross attention and cannot run with kv_connector"),
        ("example", {"path": "kv"}, "example supports only one KV cache group"),
        ("decode_bench", {}, "decode_bench cannot fill blocks of a CrossAttentionSpec"),
        (
            "multi",
            {"connectors": [{"connector": "simple_cpu", "options": ON_HOST}] * 2},
            "simple_cpu does not support a CrossAttentionSpec",
        ),
    ],
    ids=["local", "simple_cpu", "offloading", "hidden_states", "example", "decode_bench", "multi"],
)
def test_a_kv_connector_of_a_speech_model_is_rejected_by_name(
    connector: str,
    options: dict[str, Any],
    message: str,
    ec_role: str | None,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = SETTINGS | {"kv_connector": connector, "kv_connector_config": json.dumps(options)}
    if ec_role is not None:
        settings |= {"ec_connector": LOCAL, "ec_role": ec_role}
    with pytest.raises(ConfigError, match=message):
        LLM(model, **settings)


def test_a_role_without_a_connector_is_rejected(model: Path) -> None:
    with pytest.raises(ConfigError, match="ec_connector is not, so it has no effect"):
        LLM(model, ec_role="ec_producer", **SETTINGS)
