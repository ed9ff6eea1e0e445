"""A Whisper that transformers wrote, in real processes: its text, tokens and languages."""

import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import openai
import pytest

from longshore import LLM, BeamSearchParams, SamplingParams
from longshore.deploy.requests.audio import Samples, split_audio
from longshore.protocol.errors import ConfigError
from tests.deploy.sounds import as_file, tone
from tests.deploy.tiny_whisper import (
    MAX_AUDIO_S,
    MAX_TARGET_POSITIONS,
    SAMPLING_RATE,
    make_tiny_whisper,
)
from tests.integration.deployment import Deployment

NUM_TOKENS: Final = 24
SETTINGS: Final[dict[str, Any]] = {
    "num_blocks": 200,
    "max_num_seqs": 8,
    "threads": 1,
    "block_size": 16,
}
GREEDY: Final = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)


class Reference:
    """The transformers model, and its inputs."""

    def __init__(self, path: Path, model: Any) -> None:
        from transformers import WhisperFeatureExtractor, WhisperTokenizer

        self.model = model
        self.tokenizer = WhisperTokenizer.from_pretrained(path)
        self._extractor = WhisperFeatureExtractor.from_pretrained(path)

    def features(self, piece: Samples) -> Any:
        inputs = self._extractor(piece, sampling_rate=SAMPLING_RATE, return_tensors="pt")
        return inputs.input_features

    def generate(self, piece: Samples, **arguments: Any) -> list[int]:
        """The ids of the answer only, including the end."""
        ids: list[int] = self.model.generate(self.features(piece), **arguments)[0].tolist()
        return ids

    def language(self, piece: Samples) -> str:
        name: str = self.tokenizer.decode(self.model.detect_language(self.features(piece)))
        return name.strip("<|>")

    def text(self, answers: Sequence[Sequence[int]]) -> str:
        texts = [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in answers]
        return "".join(texts).strip()


def some_sounds() -> list[Samples]:
    """Sounds for which the model detects several languages and gives different answers."""
    return [tone(0.3 + 0.3 * n, 200.0 + 300 * n, noise=0.02 * n, seed=n) for n in range(6)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    path = tmp_path_factory.mktemp("whisper")
    return path, Reference(path, make_tiny_whisper(path))


@pytest.fixture(scope="module")
def path(folder: tuple[Path, Reference]) -> Path:
    return folder[0]


@pytest.fixture(scope="module")
def reference(folder: tuple[Path, Reference]) -> Reference:
    return folder[1]


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def whisper(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    flags = ["--max-audio-mib", "1", "--max-audio-s", "20"]
    with Deployment(path, tmp_path_factory.mktemp("run"), *flags) as deployment:
        yield deployment.wait_until_ready()
        assert deployment.stop() == 0, deployment.output


@pytest.fixture(scope="module")
def client(whisper: Deployment) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{whisper.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    (served,) = client.models.list().data
    return served.id


@pytest.mark.req("FEA-10")
def test_both_modes_give_the_tokens_and_languages_of_transformers(
    llm: LLM, path: Path, reference: Reference
) -> None:
    sounds = some_sounds()
    audios = [(sound, SAMPLING_RATE) for sound in sounds]
    separate = llm.transcribe(audios, sampling_params=GREEDY, use_tqdm=False)
    with LLM(path, in_process=True, **SETTINGS) as in_process:
        together = in_process.transcribe(audios, sampling_params=GREEDY, use_tqdm=False)
    for sound, ours, theirs in zip(sounds, separate, together, strict=True):
        expected = reference.generate(sound, task="transcribe", max_new_tokens=NUM_TOKENS)
        assert (
            ours.pieces[0].outputs[0].token_ids == theirs.pieces[0].outputs[0].token_ids == expected
        )
        assert ours.language == theirs.language == reference.language(sound)
        assert ours.text == theirs.text == reference.text([expected])
    assert len({output.language for output in separate}) > 1
    assert len({output.text for output in separate}) == len(sounds)


@pytest.mark.parametrize(
    ("task", "language", "prompt"),
    [("transcribe", "de", None), ("translate", "fr", None), ("translate", "de", "the cat sat")],
)
def test_language_task_and_text_before_are_heeded_as_in_transformers(
    llm: LLM, reference: Reference, task: Any, language: str, prompt: str | None
) -> None:
    sound = some_sounds()[0]
    (output,) = llm.transcribe(
        (sound, SAMPLING_RATE), language=language, task=task, prompt=prompt, use_tqdm=False
    )
    arguments: dict[str, Any] = {"language": language, "task": task}
    if prompt is not None:
        arguments["prompt_ids"] = reference.tokenizer.get_prompt_ids(prompt, return_tensors="pt")
    expected = reference.generate(sound, **arguments)
    (piece,) = output.pieces
    assert output.language == language
    assert piece.outputs[0].token_ids == expected[-len(piece.outputs[0].token_ids) :]
    assert len(piece.outputs[0].token_ids) == MAX_TARGET_POSITIONS - len(piece.prompt_token_ids)
    assert piece.outputs[0].finish_reason == "length"


def test_what_must_not_begin_an_answer_may_follow(
    path: Path, reference: Reference, tmp_path: Path
) -> None:
    from transformers import GenerationConfig

    sound = some_sounds()[0]
    arguments = {"language": "en", "task": "transcribe", "max_new_tokens": NUM_TOKENS}
    usual = set(reference.generate(sound, **arguments))
    for file in path.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink()
    settings = json.loads((path / "generation_config.json").read_text())
    settings["begin_suppress_tokens"] += usual
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    expected = reference.generate(
        sound, generation_config=GenerationConfig.from_pretrained(tmp_path), **arguments
    )
    assert expected[0] not in usual
    assert usual.intersection(expected)
    with LLM(tmp_path, in_process=True, **SETTINGS) as llm:
        (output,) = llm.transcribe(
            (sound, SAMPLING_RATE), language="en", sampling_params=GREEDY, use_tqdm=False
        )
    assert output.pieces[0].outputs[0].token_ids == expected


@pytest.mark.slow
def test_long_audio_is_transcribed_in_pieces_that_are_joined(
    llm: LLM, reference: Reference, client: openai.OpenAI, model: str
) -> None:
    sound = np.concatenate([tone(1.7, 300.0 * n, seed=n) for n in range(1, 5)])
    pieces = split_audio(sound, SAMPLING_RATE, MAX_AUDIO_S * SAMPLING_RATE)
    assert len(pieces) == 4
    expected = [reference.generate(piece, language="de", task="transcribe") for piece in pieces]
    (output,) = llm.transcribe(as_file(sound), language="de", use_tqdm=False)
    assert [piece.outputs[0].token_ids for piece in output.pieces] == expected
    assert output.text == reference.text(expected)
    answer = client.audio.transcriptions.create(model=model, file=as_file(sound), language="de")
    assert answer.text == output.text
    usage: Any = answer.usage
    assert usage.input_token_details.audio_tokens == 4 * 50 * MAX_AUDIO_S


def test_audios_in_groups_are_heard_as_together(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sounds = some_sounds()
    audios = [(np.concatenate([each, *sounds[:3]]), SAMPLING_RATE) for each in sounds]
    together = llm.transcribe(audios, sampling_params=GREEDY, use_tqdm=False)
    num_pieces = sum(len(output.pieces) for output in together)
    assert num_pieces > len(audios)
    monkeypatch.setattr("longshore.deploy.llm.transcriber.MAX_PIECES", 5)
    grouped = llm.transcribe(audios, sampling_params=GREEDY)
    assert [output.text for output in grouped] == [output.text for output in together]
    assert [output.language for output in grouped] == [output.language for output in together]
    num_requests = num_pieces + len(audios)  # each language is detected
    assert f"transcribe: 100%|██████████| {num_requests}/{num_requests}" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"audio\[0\]: .*ndarray.*pair \(samples, rate\)"):
        llm.transcribe(sounds[0], use_tqdm=False)  # type: ignore[arg-type]


@pytest.mark.req("FEA-10")
def test_official_client_gets_the_text_of_transformers_whole_and_streamed(
    client: openai.OpenAI, model: str, reference: Reference
) -> None:
    for sound in some_sounds()[:3]:
        expected = reference.generate(sound, task="transcribe")
        file = io.BytesIO(as_file(sound))
        file.name = "sound.wav"
        whole = client.audio.transcriptions.create(model=model, file=file)
        assert whole.text == reference.text([expected])
        file.seek(0)
        events = list(client.audio.transcriptions.create(model=model, file=file, stream=True))
        *deltas, done = events
        assert len(deltas) > 1
        text = "".join(event.delta for event in deltas if event.type == "transcript.text.delta")
        assert done.type == "transcript.text.done"
        assert text == done.text == whole.text
        assert done.usage is not None
        assert done.usage.output_tokens == len(expected)


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # by newer clients
def test_official_client_translates(
    client: openai.OpenAI, model: str, reference: Reference
) -> None:
    sound = some_sounds()[1]
    expected = reference.generate(sound, task="translate", language=reference.language(sound))
    answer = client.audio.translations.create(model=model, file=as_file(sound))
    assert answer.text == reference.text([expected])
    plain = client.audio.translations.create(
        model=model, file=as_file(sound), response_format="text"
    )
    assert plain == f"{answer.text}\n"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"response_format": "verbose_json"}, "timestamps are not computed"),
        ({"timestamp_granularities": ["word"]}, "timestamp_granularities is not supported"),
        ({"chunking_strategy": "auto"}, "chunking_strategy is not supported"),
        ({"include": ["logprobs"]}, "include is not supported"),
        ({"language": "xx"}, "not supported by this model"),
        ({"file": b"no sound"}, "cannot be read as audio"),
        ({"file": as_file(np.zeros(21 * 8000, np.float32), 8000)}, "longer than the limit of 20 s"),
    ],
    # the same in every process, but a file created now contains the time
    ids=["format", "timestamps", "chunking", "include", "language", "no sound", "too long"],
)
def test_rejections_reach_the_official_client_as_its_own_errors(
    client: openai.OpenAI, model: str, arguments: dict[str, Any], reason: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=reason):
        client.audio.transcriptions.create(
            **{"model": model, "file": as_file(tone(0.1)), **arguments}
        )


def test_too_large_a_file_is_rejected_with_its_limit(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.APIStatusError, match="--max-audio-mib") as caught:
        client.audio.transcriptions.create(model=model, file=b"a" * (1 << 20 | 1))
    assert caught.value.status_code == 413


def test_text_is_rejected_with_the_endpoint_for_audio(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError, match="/v1/audio/transcriptions"):
        client.completions.create(model=model, prompt="x")
    with pytest.raises(openai.BadRequestError, match="/v1/audio/transcriptions"):
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": "x"}])


def test_audio_is_rejected_by_a_model_for_text(deployment: Deployment) -> None:
    with openai.OpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0) as client:
        (served,) = client.models.list().data
        with pytest.raises(openai.BadRequestError, match="takes text, not audio"):
            client.audio.transcriptions.create(model=served.id, file=as_file(tone(0.1)))


def test_llm_takes_what_its_model_takes(llm: LLM, tiny_model: tuple[Path, Any]) -> None:
    with pytest.raises(ValueError, match=r"use LLM\.transcribe"):
        llm.generate("x", use_tqdm=False)
    with pytest.raises(ValueError, match=r"use LLM\.transcribe"):
        llm.beam_search("x", BeamSearchParams(beam_width=2, max_tokens=2))
    with pytest.raises(ValueError, match=r"audio\[1\].*cannot be read as audio"):
        llm.transcribe([as_file(tone(0.1)), b"no sound"], use_tqdm=False)
    with (
        LLM(tiny_model[0], in_process=True, num_blocks=600, threads=1) as text_llm,
        pytest.raises(ValueError, match=r"use LLM\.generate"),
    ):
        text_llm.transcribe((tone(0.1), SAMPLING_RATE))


def test_many_audios_on_few_blocks_are_preempted_and_heard_alike(llm: LLM, path: Path) -> None:
    audios = [(tone(1.0, 150.0 + 100 * n, seed=n), SAMPLING_RATE) for n in range(12)]
    calm = llm.transcribe(audios, language="en", use_tqdm=False)
    settings = {**SETTINGS, "num_blocks": 33, "max_num_encoder_input_tokens": 300}
    gates = {"watermark": 0.0, "preempt_threshold": 1.0, "admit_threshold": 1.0}
    with LLM(path, in_process=True, verify_plan=True, **settings, **gates) as tight:
        pressed = tight.transcribe(audios, language="en", use_tqdm=False)
    assert [output.text for output in pressed] == [output.text for output in calm]
    assert sum(output.pieces[0].outputs[0].num_preemptions for output in pressed) > 0


def test_samples_are_drawn_alike_for_one_seed(llm: LLM) -> None:
    audio = (some_sounds()[0], SAMPLING_RATE)
    params = [SamplingParams(temperature=1.5, seed=seed, max_tokens=20) for seed in (1, 1, 2)]
    texts = [
        llm.transcribe(audio, language="en", sampling_params=each, use_tqdm=False)[0].text
        for each in params
    ]
    assert texts[0] == texts[1] != texts[2]


def test_encoder_budget_is_checked_at_start(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_num_encoder_input_tokens=99.*at least 100"):
        LLM(path, max_num_encoder_input_tokens=99, **SETTINGS)
    with LLM(path, in_process=True, **SETTINGS) as llm:
        assert llm.settings_in_force["scheduler"]["max_num_encoder_input_tokens"] == 100


def test_pipeline_stages_are_rejected_by_name(path: Path) -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_size=2"):
        LLM(path, pipeline_parallel_size=2, **SETTINGS)


@pytest.mark.slow
def test_two_ranks_hear_what_one_hears(llm: LLM, path: Path) -> None:
    audios = [(sound, SAMPLING_RATE) for sound in some_sounds()]
    alone = llm.transcribe(audios, sampling_params=GREEDY, use_tqdm=False)
    with LLM(path, tensor_parallel_size=2, **SETTINGS) as pair:
        shared = pair.transcribe(audios, sampling_params=GREEDY, use_tqdm=False)
    assert [output.language for output in shared] == [output.language for output in alone]
    assert [output.text for output in shared] == [output.text for output in alone]
