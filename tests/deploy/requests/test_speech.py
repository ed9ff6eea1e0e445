"""Requests to a Whisper model, compared with the prompts of transformers' tokenizer."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longshore.deploy.gateway.text.detokenizer import IncrementalDetokenizer
from longshore.deploy.gateway.text.tokenizer import load_tokenizer
from longshore.deploy.model.folder import AudioInput
from longshore.deploy.requests.speech import BadSpeechRequest, SpeechModel, join_texts
from longshore.protocol.errors import ConfigError
from longshore.protocol.sampling import MAX_BAD_WORDS, SamplingParams
from tests.deploy.sounds import tone
from tests.deploy.tiny_tokenizer import save_tokenizer
from tests.deploy.tiny_whisper import LANGUAGES, save_whisper_settings, save_whisper_tokenizer

AUDIO = AudioInput(sampling_rate=16_000, max_samples=32_000, num_tokens=100)
MAX_LEN = 64


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The tokenizer of transformers."""
    return save_whisper_tokenizer(tmp_path_factory.mktemp("theirs"))


def speech_model(path: Path, **settings: Any) -> SpeechModel:
    """settings: of generation_config.json, in addition to the usual ones."""
    save_whisper_tokenizer(path)
    save_whisper_settings(path, **settings)
    return read(path)


def read(path: Path) -> SpeechModel:
    return SpeechModel(path, AUDIO, load_tokenizer(path), vocab_size=400, max_model_len=MAX_LEN)


@pytest.mark.parametrize("task", ["transcribe", "translate"])
@pytest.mark.parametrize("language", LANGUAGES)
def test_prompt_names_language_and_task_as_transformers_does(
    tmp_path: Path, language: str, task: str, theirs: Any
) -> None:
    speech = speech_model(tmp_path)
    expected = theirs.convert_tokens_to_ids(
        ["<|startoftranscript|>", f"<|{language}|>", f"<|{task}|>", "<|notimestamps|>"]
    )
    assert speech.prompt(speech.language(language.upper(), task), task, None) == expected
    assert speech.prompt(language, task, "  ") == expected


def test_text_before_stands_before_the_start(tmp_path: Path, theirs: Any) -> None:
    speech = speech_model(tmp_path)
    prompt = speech.prompt("en", "transcribe", "  the cat sat on the mat ")
    expected = theirs.get_prompt_ids("the cat sat on the mat", return_tensors=None)
    assert prompt == [*expected, *speech.prompt("en", "transcribe", None)]


def test_of_a_long_text_before_the_end_is_kept(tmp_path: Path, theirs: Any) -> None:
    speech = speech_model(tmp_path)
    text = "".join(chr(97 + n % 26) for n in range(500))
    prompt = speech.prompt("en", "transcribe", text)
    ids = theirs(f" {text}", add_special_tokens=False).input_ids
    assert prompt[1:-4] == ids[-(MAX_LEN // 2 - 1) :]


def test_text_before_holds_no_special_token(tmp_path: Path) -> None:
    with pytest.raises(BadSpeechRequest, match="special token") as caught:
        speech_model(tmp_path).prompt("en", "transcribe", "a <|de|> b")
    assert caught.value.param == "prompt"


def test_english_model_has_neither_language_nor_task(tmp_path: Path, theirs: Any) -> None:
    speech = speech_model(tmp_path, is_multilingual=False)
    expected = theirs.convert_tokens_to_ids(["<|startoftranscript|>", "<|notimestamps|>"])
    for asked in (None, "en"):
        language = speech.language(asked, "transcribe")
        assert not speech.must_detect(language)
        assert speech.prompt(language, "transcribe", None) == expected
    with pytest.raises(BadSpeechRequest, match="only supports English"):
        speech.language("de", "transcribe")
    with pytest.raises(BadSpeechRequest, match="cannot translate"):
        speech.language(None, "translate")


def test_unknown_languages_and_tasks_are_rejected_with_those_that_are_known(tmp_path: Path) -> None:
    speech = speech_model(tmp_path)
    with pytest.raises(BadSpeechRequest, match=r"'klingon'.*de, en, fr, haw") as caught:
        speech.language("klingon", "transcribe")
    assert caught.value.param == "language"
    with pytest.raises(BadSpeechRequest, match="transcribe or translate"):
        speech.language(None, "sing")


@pytest.mark.parametrize(
    "settings",
    [{"language": "<|de|>"}, {"language": "de"}, {"forced_decoder_ids": [[1, "de"], [2, 1]]}],
    ids=str,
)
def test_model_tuned_to_a_language_is_not_asked_which_it_is(
    tmp_path: Path, settings: dict[str, Any], theirs: Any
) -> None:
    if "forced_decoder_ids" in settings:
        settings["forced_decoder_ids"][0][1] = theirs.convert_tokens_to_ids("<|de|>")
    speech = speech_model(tmp_path, **settings)
    assert speech.language(None, "transcribe") == "de"
    assert speech.language("fr", "transcribe") == "fr"


@pytest.mark.parametrize("forced", [None, [[1, None], [2, 268]]])
def test_other_models_have_the_language_detected(tmp_path: Path, forced: Any) -> None:
    speech = speech_model(tmp_path, forced_decoder_ids=forced)
    assert speech.must_detect(speech.language(None, "transcribe"))
    (start,), sampling = speech.detection()
    assert sampling.max_tokens == 1
    assert set(sampling.logit_bias or ()) == set(speech.languages.values())
    for code, token_id in speech.languages.items():
        assert speech.detected([token_id]) == code
    with pytest.raises(BadSpeechRequest, match="could not be detected"):
        speech.detected([start])


def test_folder_without_settings_is_understood_by_its_tokens(tmp_path: Path) -> None:
    save_whisper_tokenizer(tmp_path)
    assert set(read(tmp_path).languages) == set(LANGUAGES)


def test_folder_whose_tokens_say_nothing_is_rejected(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match=r"no token <\|startoftranscript\|>"):
        read(tmp_path)
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        read(tmp_path / "empty")


def test_suppressed_tokens_are_bad_words_for_ever_or_at_the_start(
    tmp_path: Path, theirs: Any
) -> None:
    settings = {"suppress_tokens": [5, 6, 100_000], "begin_suppress_tokens": [220]}
    speech = speech_model(tmp_path, **settings)
    sampling = speech.params(
        SamplingParams(max_tokens=7, min_tokens=2, bad_words_token_ids=((1, 2),))
    )
    last = theirs.convert_tokens_to_ids("<|notimestamps|>")
    assert sampling.bad_words_token_ids == ((5,), (6,), (last, 220), (1, 2))
    assert (sampling.max_tokens, sampling.min_tokens) == (8, 3)  # the prompt's last token counts
    assert speech.params(SamplingParams(max_tokens=None)).max_tokens is None
    with pytest.raises(BadSpeechRequest, match="bad words"):
        speech.params(SamplingParams(bad_words_token_ids=tuple((i,) for i in range(254))))
    with pytest.raises(BadSpeechRequest, match="prompt_logprobs"):
        speech.params(SamplingParams(prompt_logprobs=1))


@pytest.mark.parametrize(
    "settings",
    [{"suppress_tokens": ["a"]}, {"lang_to_id": [1]}, {"forced_decoder_ids": [1]}],
    ids=str,
)
def test_settings_that_make_no_sense_are_rejected_with_their_file(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=r"generation_config\.json is not in Whisper"):
        speech_model(tmp_path, **settings)


def test_more_suppressed_tokens_than_can_be_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{MAX_BAD_WORDS} are supported"):
        speech_model(tmp_path, suppress_tokens=list(range(256)))


def test_timestamps_are_no_text(tmp_path: Path, theirs: Any) -> None:
    speech = speech_model(tmp_path)
    ids = theirs("<|0.00|> the<|1.20|><|1.22|> a<|endoftext|>", add_special_tokens=False).input_ids
    detokenizer = IncrementalDetokenizer(speech.tokenizer)
    text = "".join(detokenizer.append([token_id]) for token_id in ids) + detokenizer.finish()
    assert text == theirs.decode(ids, skip_special_tokens=True) == " the a"


def test_feature_is_the_piece_s_samples(tmp_path: Path) -> None:
    piece = tone(0.1)
    feature = speech_model(tmp_path).feature(piece)
    assert np.array_equal(feature.data.view("<f4"), piece)
    assert np.shares_memory(feature.data, piece)
    assert feature.hash == hashlib.sha256(piece.tobytes()).hexdigest()
    assert (feature.offset, feature.num_tokens, feature.modality) == (0, 100, "audio")


def test_texts_are_joined_as_the_model_writes_them() -> None:
    assert join_texts([" Well,", " yes", "", ". No."]) == "Well, yes. No."
    assert join_texts(["天気が", "いい"]) == "天気がいい"
