"""Published weights, from a GGUF file and from safetensors, through real processes: the answers of
transformers in float32 on every path and through every API, and texts that make sense.

SmolLM2-135M has 9 heads and 3 KV heads, so it is divided among three ranks, not two.
"""

import functools
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

import anthropic
import gguf
import openai
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from longshore import LLM, SamplingParams
from longshore.deploy.llm.perplexity import default_text, perplexity, text_tokens
from longshore.deploy.model.folder import read_model_folder
from longshore.deploy.model.known_models import KNOWN_MODELS, pull
from longshore.worker.kernels.native import native
from tests.clients.compatibility import INSTALLED, NotInstalledError, python_of
from tests.conftest import ROOT
from tests.gguf.cases import FILES
from tests.gguf.writing import changed
from tests.integration.deployment import PATIENCE_S, Deployment, wait_until
from tests.reference import ReferenceAnswer, assert_greedy_equal, caches_of

pytestmark = [pytest.mark.services, pytest.mark.slow, pytest.mark.timeout(900)]

FETCHED: Final = ROOT / ".venv" / "models"
NUM_PROMPTS: Final = 60
NUM_PROMPTS_OF_A_LONG_RUN: Final = 200
NUM_FEW: Final = 12
PROMPT_LEN: Final = 16
NUM_TOKENS: Final = 8
BLOCK_SIZE: Final = 8
NUM_PREDICTED: Final = 2048
NUM_STORED: Final = 4
"""Prompts whose blocks fit into host memory."""
SYSTEM: Final = "You are a helpful assistant."
SYSTEM_MESSAGE: Final = ({"role": "system", "content": SYSTEM},)
QUESTIONS: Final = ("What is the capital of France?", "Write a haiku about it.")
"""Of one conversation."""
TEXTS: Final = ("def fibonacci(n):\n    ", " Größe 123, 中文 text: \n\n  x = 5;")
MAX_TOKENS: Final = 24
TIE: Final = 1e-3
"""In logits. Sums in float32 differ more with real weights than with random ones."""
MEMORY_OF_LOADING: Final = """
import re, sys, threading, time
from longshore.worker.config import WorkerConfig
from longshore.worker.worker import Worker

def in_memory():  # without pages of files
    with open("/proc/self/status") as file:
        return int(re.search(r"RssAnon:\\s+(\\d+)", file.read())[1]) * 1024

def watch():
    while not is_loaded.wait(0.01):
        samples.append(in_memory())

def load(model):
    return Worker(WorkerConfig(model=model, num_blocks=8, max_model_len=64, dtype="bfloat16"))

load(sys.argv[1])  # which imports everything
samples, is_loaded = [in_memory()], threading.Event()
thread = threading.Thread(target=watch, daemon=True)
thread.start()
worker = load(sys.argv[2])
is_loaded.set()
thread.join()
print(max(samples) - samples[0])
"""
GREEDY: Final = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


def fetched(name: str) -> Path:
    """The folder of a known model, which is fetched once per environment."""
    FETCHED.mkdir(mode=0o700, exist_ok=True)
    return pull(KNOWN_MODELS[name], FETCHED)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """A second one costs transformers more than it gives: a step reads all weights."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def folder() -> Path:
    return fetched("smollm2")


@pytest.fixture(scope="module")
def reference(folder: Path) -> tuple[Any, Any]:
    """The model and the tokenizer that transformers make of the GGUF file."""
    (file,) = (file.name for file in folder.glob("*.gguf"))
    with pytest.MonkeyPatch.context() as patch:
        # transformers reads the file three times, and makes the map once for each module.
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
        model.hf_quantizer = None  # it has floats
        del model.config.quantization_config
        return model.eval(), AutoTokenizer.from_pretrained(folder, gguf_file=file)


@pytest.fixture(scope="module")
def text() -> str:
    return (ROOT / "docs" / "offloading.md").read_text() + (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def prompts(reference: tuple[Any, Any], text: str, long_run: bool) -> list[list[int]]:
    """Of the same length. They begin at any place of a text, and every second one with the first
    half of the one before."""
    ids = reference[1](text).input_ids
    rng = random.Random(0)
    num_prompts = NUM_PROMPTS_OF_A_LONG_RUN if long_run else NUM_PROMPTS
    starts = [rng.randrange(len(ids) - PROMPT_LEN) for _ in range(num_prompts)]
    prompts = [ids[start : start + PROMPT_LEN] for start in starts]
    for before, prompt in zip(prompts[::2], prompts[1::2], strict=True):
        prompt[: PROMPT_LEN // 2] = before[: PROMPT_LEN // 2]
    return prompts


@pytest.fixture(scope="module")
def answers(reference: tuple[Any, Any], prompts: list[list[int]]) -> list[ReferenceAnswer]:
    return greedy_references(reference[0], prompts)


def greedy_references(model: Any, prompts: Sequence[Sequence[int]]) -> list[ReferenceAnswer]:
    """Of prompts of one length, all at once."""
    inputs, caches = torch.tensor(prompts), dict[str, Any]()
    answers = [ReferenceAnswer([], []) for _ in prompts]
    with torch.inference_mode():
        for _ in range(NUM_TOKENS):
            output = model(inputs, use_cache=True, logits_to_keep=1, **caches)
            best, caches = output.logits[:, -1].topk(2), caches_of(output)
            for answer, token, (first, second) in zip(
                answers, best.indices[:, 0].tolist(), best.values.tolist(), strict=True
            ):
                answer.token_ids.append(token)
                answer.margins.append(first - second)
            inputs = best.indices[:, :1]
    return answers


def generated(llm: LLM, prompts: Sequence[Sequence[int]]) -> list[Any]:
    return llm.generate(
        [{"prompt_token_ids": list(prompt)} for prompt in prompts], GREEDY, use_tqdm=False
    )


def stored(llm: LLM, prompts: Sequence[Sequence[int]]) -> list[Any]:
    """Generate a few at a time, and wait for the disk: what host memory evicts before is lost."""
    outputs, blocks = list[Any](), set[tuple[int, ...]]()
    for start in range(0, len(prompts), NUM_STORED):
        few = prompts[start : start + NUM_STORED]
        outputs += generated(llm, few)
        for prompt in few:
            blocks |= {tuple(prompt[:end]) for end in range(BLOCK_SIZE, PROMPT_LEN + 1, BLOCK_SIZE)}
        wait_until(functools.partial(has_on_disk, llm, len(blocks)))
    return outputs


def has_on_disk(llm: LLM, num_blocks: int) -> bool:
    tiers = [each for each in llm.get_metrics() if each.name == "longshore_kv_tier_blocks"]
    return [tier.value for tier in tiers if tier.labels["medium"] == "DISK"] == [num_blocks]


def tokens_of(outputs: Sequence[Any]) -> list[Sequence[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_a_quantised_model_is_loaded_in_little_more_memory_than_its_file(
    folder: Path, tmp_path: Path
) -> None:
    small = changed(FILES / "llama.gguf", tmp_path / "small.gguf", quantise=True)
    models = [str(read_model_folder(model, tmp_path).path) for model in (small, folder)]
    command = [sys.executable, "-c", MEMORY_OF_LOADING, *models]
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    (file,) = folder.glob("*.gguf")
    assert file.stat().st_size * 0.9 < int(found.stdout) < file.stat().st_size * 1.15


def test_chunks_hits_and_preemptions_change_no_token(
    folder: Path, prompts: list[list[int]], answers: list[ReferenceAnswer]
) -> None:
    with LLM(
        folder,
        device="cpu",
        dtype="float32",
        state_dir=FETCHED,
        threads=1,
        block_size=BLOCK_SIZE,
        num_blocks=70,  # a few too small for 32 requests
        max_model_len=PROMPT_LEN + NUM_TOKENS,
        max_num_seqs=32,
        max_num_batched_tokens=200,
        watermark=0.0,
        preempt_threshold=1.0,
        admit_threshold=1.0,
    ) as llm:
        outputs = generated(llm, prompts)
    assert_greedy_equal(tokens_of(outputs), answers, tie=TIE)
    assert any(output.outputs[0].num_preemptions for output in outputs)
    assert sum(output.num_cached_tokens >= BLOCK_SIZE for output in outputs) > NUM_FEW


@pytest.mark.skipif(
    native() is None or not native().multiplies_bfloat16, reason="no products of bfloat16"
)
def test_quantised_products_are_exact_and_rounded_inputs_keep_the_perplexity(
    folder: Path, prompts: list[list[int]]
) -> None:
    tokens, perplexities = {}, {}
    for weights in ("auto", "dequantised", "int8"):
        settings = {"device": "cpu", "dtype": "bfloat16", "state_dir": FETCHED, "threads": 1}
        with LLM(folder, quantised_weights=weights, **settings) as llm:
            if weights != "int8":
                tokens[weights] = tokens_of(generated(llm, prompts))
            if weights != "dequantised":
                text = text_tokens(llm, default_text(), NUM_PREDICTED)
                perplexities[weights] = perplexity(llm, text)
    assert tokens["auto"] == tokens["dequantised"]
    assert perplexities["int8"] == pytest.approx(perplexities["auto"], rel=0.005)


def test_tiers_and_a_restart_change_no_token(
    folder: Path, prompts: list[list[int]], answers: list[ReferenceAnswer], tmp_path: Path
) -> None:
    tiers = {"cpu_bytes_to_use": "4MiB", "disk_path": str(tmp_path), "disk_bytes": "1GiB"}
    settings: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "state_dir": FETCHED,
        "threads": 1,
        "block_size": BLOCK_SIZE,
        "num_blocks": 18,  # for six requests
        "max_model_len": PROMPT_LEN + NUM_TOKENS,
        "kv_connector": "offloading",
        "kv_connector_config": tiers,
        "min_load_wait_s": 60.0,  # a late read is a miss
    }
    few, wanted = prompts[:NUM_FEW], answers[:NUM_FEW]
    for run in ("new", "again", "after a restart"):
        if run != "again":
            llm = LLM(folder, **settings)
        outputs = stored(llm, few) if run == "new" else generated(llm, few)
        assert_greedy_equal(tokens_of(outputs), wanted, tie=TIE)
        num_cached = [output.num_cached_tokens for output in outputs]
        assert run == "new" or min(num_cached) >= PROMPT_LEN - BLOCK_SIZE, (run, num_cached)
        if run != "new":
            llm.close()


def test_three_ranks_change_no_token(
    folder: Path, prompts: list[list[int]], answers: list[ReferenceAnswer]
) -> None:
    with LLM(
        folder,
        device="cpu",
        dtype="float32",
        state_dir=FETCHED,
        tensor_parallel_size=3,
        threads=1,
        num_blocks=200,
        max_model_len=PROMPT_LEN + NUM_TOKENS,
    ) as llm:
        outputs = generated(llm, prompts[:NUM_FEW])
    assert_greedy_equal(tokens_of(outputs), answers[:NUM_FEW], tie=TIE)


def test_prefill_and_decode_apart_change_no_token(
    folder: Path, prompts: list[list[int]], answers: list[ReferenceAnswer], tmp_path: Path
) -> None:
    with Deployment(
        folder,
        tmp_path,
        *("--prefill", "1", "--decode", "1", "--dtype", "float32", "--kv-connector", "nixl"),
        *("--max-model-len", "512", "--state-dir", str(FETCHED)),
        environment={"UCX_TLS": "tcp"},
    ) as deployment:
        few = prompts[:NUM_FEW]
        choices = completed(
            deployment.wait_until_ready(), few, max_tokens=NUM_TOKENS, ignore_eos=True
        )
        assert deployment.stop() == 0, deployment.output
    got = [choice["token_ids"] for choice in choices]
    assert_greedy_equal(got, answers[:NUM_FEW], tie=TIE)


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with Deployment(
        folder,
        tmp_path_factory.mktemp("served"),
        *("--dtype", "float32", "--max-num-batched-tokens", "512", "--state-dir", str(FETCHED)),
    ) as deployment:
        yield deployment.wait_until_ready()
        assert deployment.stop() == 0, deployment.output


def ask(server: Deployment, path: str, body: dict[str, Any]) -> Any:
    """The answer, or the events of a stream."""
    request = urllib.request.Request(
        f"{server.url}{path}",
        json.dumps({"model": "smollm2", **body}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        if response.headers["content-type"].startswith("application/json"):
            return json.load(response)
        lines = [line.decode().strip().removeprefix("data: ") for line in response]
        return [json.loads(line) for line in lines if line.startswith("{")]


def completed(server: Deployment, prompts: Any, **options: Any) -> list[Any]:
    """The choices of a completion of each prompt, which are texts or lists of tokens."""
    body = {"prompt": prompts, "temperature": 0, "return_token_ids": True, **options}
    choices: list[Any] = ask(server, "/v1/completions", body)["choices"]
    return choices


def test_texts_have_the_tokens_that_transformers_give_them(
    served: Deployment, reference: tuple[Any, Any], text: str
) -> None:
    ids = ask(served, "/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
    assert ids == reference[1](text).input_ids
    assert ask(served, "/detokenize", {"tokens": ids})["prompt"] == text


def test_the_perplexity_of_a_text_is_that_of_transformers(
    served: Deployment, reference: tuple[Any, Any], text: str
) -> None:
    ids = reference[1](text).input_ids[:256]
    with torch.inference_mode():
        wanted = float(reference[0](torch.tensor([ids]), labels=torch.tensor([ids])).loss)
    (choice,) = completed(served, ids, max_tokens=1, echo=True, logprobs=0)
    scores = choice["logprobs"]["token_logprobs"][1 : len(ids)]
    assert len(scores) == len(ids) - 1
    assert math.exp(-sum(scores) / len(scores)) == pytest.approx(math.exp(wanted), rel=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("length", [2000, 8000])
def test_a_needle_is_found_as_transformers_find_it(
    served: Deployment, reference: tuple[Any, Any], text: str, length: int
) -> None:
    model, tokenizer = reference
    hay = tokenizer(text * 4).input_ids
    needle = tokenizer("\n\nThe secret number of the harbour is 7341.\n\n").input_ids
    question = tokenizer("\n\nThe secret number of the harbour is").input_ids
    middle = length // 3
    prompt = [*hay[:middle], *needle, *hay[middle : length - 50], *question]
    wanted = greedy_references(model, [prompt])
    (choice,) = completed(served, prompt, max_tokens=NUM_TOKENS, ignore_eos=True)
    assert_greedy_equal([choice["token_ids"]], wanted, tie=TIE)
    assert "7341" in choice["text"]


def answer_of(reference: tuple[Any, Any], text: str) -> list[int]:
    """The greedy tokens of transformers, until the end of the answer."""
    model, tokenizer = reference
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    tokens = model.generate(ids, max_new_tokens=MAX_TOKENS, do_sample=False)[0, ids.shape[1] :]
    answer: list[int] = tokens.tolist()
    return answer


def test_code_and_other_languages_are_continued_as_by_transformers(
    served: Deployment, reference: tuple[Any, Any]
) -> None:
    got = [choice["token_ids"] for choice in completed(served, TEXTS, max_tokens=MAX_TOKENS)]
    assert got == [answer_of(reference, text) for text in TEXTS]


class Turn(NamedTuple):
    """One question of a conversation.

    messages: of the conversation until then, without the system message.
    text:     what the template makes of it.
    answer:   of transformers.
    """

    messages: list[dict[str, str]]
    text: str
    answer: str


@pytest.fixture(scope="module")
def conversation(reference: tuple[Any, Any]) -> list[Turn]:
    turns: list[Turn] = []
    messages: list[dict[str, str]] = []
    for question in QUESTIONS:
        messages = [*messages, {"role": "user", "content": question}]
        text = reference[1].apply_chat_template(
            [*SYSTEM_MESSAGE, *messages], tokenize=False, add_generation_prompt=True
        )
        answer = reference[1].decode(answer_of(reference, text), skip_special_tokens=True)
        turns.append(Turn(messages, text, answer))
        messages = [*messages, {"role": "assistant", "content": answer}]
    return turns


class Dialect(NamedTuple):
    """How an API is asked.

    asked: what a request says in addition to model, limits and temperature.
    whole: the text of an answer.
    part:  the text of an event of a stream.
    """

    path: str
    asked: Callable[[Turn], dict[str, Any]]
    whole: Callable[[Any], str]
    part: Callable[[Any], str]


LIMITS: Final = {"temperature": 0, "max_tokens": MAX_TOKENS}
OLLAMA: Final = {"options": {"temperature": 0, "num_predict": MAX_TOKENS}}
DIALECTS: Final = {
    "chat completions": Dialect(
        "/v1/chat/completions",
        lambda turn: {"messages": [*SYSTEM_MESSAGE, *turn.messages], **LIMITS},
        lambda answer: answer["choices"][0]["message"]["content"],
        lambda event: event["choices"][0]["delta"].get("content", ""),
    ),
    "completions": Dialect(
        "/v1/completions",
        lambda turn: {"prompt": turn.text, **LIMITS},
        lambda answer: answer["choices"][0]["text"],
        lambda event: event["choices"][0]["text"],
    ),
    "Responses": Dialect(
        "/v1/responses",
        lambda turn: {
            "instructions": SYSTEM,
            "input": turn.messages,
            "temperature": 0,
            "max_output_tokens": MAX_TOKENS,
        },
        lambda answer: answer["output"][0]["content"][0]["text"],
        lambda event: event["delta"] if event["type"] == "response.output_text.delta" else "",
    ),
    "Messages": Dialect(
        "/v1/messages",
        lambda turn: {"system": SYSTEM, "messages": turn.messages, **LIMITS},
        lambda answer: answer["content"][0]["text"],
        lambda event: event.get("delta", {}).get("text", ""),
    ),
    "Ollama's chat": Dialect(
        "/api/chat",
        lambda turn: {"messages": [*SYSTEM_MESSAGE, *turn.messages], **OLLAMA},
        *(lambda answer: answer["message"]["content"],) * 2,
    ),
    "Ollama's generate": Dialect(
        "/api/generate",
        lambda turn: {"prompt": turn.text, "raw": True, **OLLAMA},
        *(lambda answer: answer["response"],) * 2,
    ),
}


def test_all_apis_give_the_answers_of_transformers(
    served: Deployment, conversation: list[Turn]
) -> None:
    """At the same time, whole and streamed."""

    def answer(name: str, turn: Turn, is_streamed: bool) -> str:
        dialect = DIALECTS[name]
        got = ask(served, dialect.path, {**dialect.asked(turn), "stream": is_streamed})
        if not is_streamed:
            return dialect.whole(got)
        parts = list(filter(None, map(dialect.part, got)))
        assert len(parts) > 1, (name, got)
        return "".join(parts)

    cases = [
        (name, turn, is_streamed)
        for turn in conversation
        for name in DIALECTS
        for is_streamed in (False, True)
    ]
    with ThreadPoolExecutor(len(cases)) as threads:
        texts = list(threads.map(lambda case: answer(*case), cases))
    for (name, turn, is_streamed), text in zip(cases, texts, strict=True):
        assert text == turn.answer, (name, is_streamed)
    assert "Paris" in conversation[0].answer


def test_the_clients_of_agents_have_the_conversation_of_transformers(
    served: Deployment, conversation: list[Turn]
) -> None:
    """Each sends the answers back as it got them."""
    first, second = conversation
    asked: dict[str, Any] = {"model": "smollm2", "temperature": 0}
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        asked_responses = {**asked, "instructions": SYSTEM, "max_output_tokens": MAX_TOKENS}
        response = client.responses.create(**asked_responses, input=QUESTIONS[0])
        assert response.output_text == first.answer
        with client.responses.stream(
            **asked_responses, input=QUESTIONS[1], previous_response_id=response.id
        ) as stream:
            deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert "".join(deltas) == second.answer
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        messages: list[Any] = []
        for question, turn in zip(QUESTIONS, conversation, strict=True):
            messages.append({"role": "user", "content": question})
            with client.messages.stream(
                model="smollm2",
                system=SYSTEM,
                messages=messages,
                max_tokens=MAX_TOKENS,
                extra_body={"temperature": 0},
            ) as stream:
                message = stream.get_final_message()
            assert message.content[0].text == turn.answer
            messages.append({"role": "assistant", "content": message.content})


@pytest.mark.long
def test_lm_eval_scores_the_server_as_it_scores_transformers(
    served: Deployment, reference: tuple[Any, Any]
) -> None:
    try:
        python = python_of("lm_eval", INSTALLED)
    except NotInstalledError:
        pytest.skip("lm_eval is not installed; scripts/test --all installs it")
    with tempfile.TemporaryDirectory() as folder:
        for part in reference:
            part.save_pretrained(folder)
        ended = subprocess.run(
            [str(python), str(ROOT / "tests/integration/lm_eval_task.py"), served.url, folder],
            cwd=folder,
            env={
                "HOME": folder,
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
                "PATH": os.defpath,
            },
            capture_output=True,
            text=True,
            timeout=PATIENCE_S * 5,
        )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    scores = json.loads(ended.stdout.splitlines()[-1])
    ours, theirs = scores["server"], scores["transformers"]
    assert ours["log_likelihoods"] == pytest.approx(theirs["log_likelihoods"], abs=1e-2)
    assert ours["accuracy"] == theirs["accuracy"] > 0.5


def test_the_quick_start_shows_two_answers_and_a_prefix_hit(folder: Path) -> None:
    run = subprocess.run(
        [sys.executable, ROOT / "scripts" / "first_chat.py", "--once"],
        env=os.environ | {"LONGSHORE_STATE_DIR": str(FETCHED)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert run.returncode == 0, run.stderr
    # In bfloat16, the words depend on the processor.
    answers = re.findall(r"^> (.*)", run.stdout, re.M)
    assert any("direction" in answer for answer in answers)
    assert any("worker" in answer and "six weeks" in answer for answer in answers)
    hits = re.findall(r"prompt's (\d+) tokens, (\d+) came from the prefix cache", run.stdout)
    assert [int(cached) > 0 for _, cached in hits] == [False, True]


def test_embeddings_are_those_of_transformers() -> None:
    folder = fetched("minilm")
    texts = ["A cat sits on the mat.", "A kitten lies on a rug.", "The ship leaves the harbour."]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        hidden = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state for text in texts]
    wanted = torch.nn.functional.normalize(torch.stack([each[0].mean(0) for each in hidden]))
    with LLM(folder, device="cpu", dtype="float32", state_dir=FETCHED, num_blocks=200) as llm:
        vectors = [output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)]
    got = torch.tensor(vectors)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
    similarities = got @ got.T
    assert similarities[0, 1] > similarities[0, 2] + 0.3
