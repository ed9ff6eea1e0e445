"""Prefix hits of an agent's session with and without `preserve_thinking`.

    python benchmarks/preserved_thinking.py [--questions 4] [--calls 5] [--json F]

Templates of reasoning models show the reasoning of an answer until the user's next message, and
leave it out from then on. So the first request after that message shares only the part before the
first of these answers with the cache; with the variable `preserve_thinking`, the reasoning stays.

A session answers questions of a user, each after calls of a tool. A scripted model (see
`tests/scripted_model.py`) writes the same reasoning and text in each answer; scheduler, block pool
and worker are real, and one request runs at a time.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import report

sys.path.insert(0, str(report.ROOT))  # for helpers of the tests

from longshore import LLM, SamplingParams
from tests.scripted_model import make_scripted_model

MAX_MODEL_LEN: Final = 16_384
SYSTEM_TOKENS: Final = 1_000
QUESTION_TOKENS: Final = 100
RESULT_TOKENS: Final = 300
REASONING_TOKENS: Final = 200
CALL_TOKENS: Final = 50
ANSWER_TOKENS: Final = 100
TEMPLATE: Final = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ '<|call|>' if m.content.startswith('call') else '<|answer|>' }}"
    "{% if preserve_thinking or loop.index0 > ns.last %}{{ m.reasoning_content }}{% endif %}"
    "{% endif %}{{ m.content }}{% endfor %}"
    "{{ '<|answer|>' if messages[-1].content.startswith('R') else '<|call|>' }}"
)


def pieces(name: str, number: int) -> list[str]:
    return [f"{name}{index};" for index in range(number)]


SCRIPT: Final = {
    "<|call|>": (pieces("think", REASONING_TOKENS), pieces("call", CALL_TOKENS)),
    "<|answer|>": (pieces("reason", REASONING_TOKENS), pieces("answer", ANSWER_TOKENS)),
}
"""The reasoning and the text of each kind of answer."""


def session(llm: LLM, num_questions: int, num_calls: int, *, is_preserved: bool) -> list[Any]:
    """The outputs of all requests of one session."""
    params = SamplingParams(temperature=0, max_tokens=512)
    messages: list[dict[str, str]] = [{"role": "system", "content": "s" * SYSTEM_TOKENS}]
    outputs = []
    for _ in range(num_questions):
        messages.append({"role": "user", "content": "q" * QUESTION_TOKENS})
        for number in range(num_calls + 1):
            (output,) = llm.chat(
                messages,
                params,
                use_tqdm=False,
                chat_template_kwargs={"preserve_thinking": is_preserved},
            )
            is_last = number == num_calls
            reasoning, text = map("".join, SCRIPT["<|answer|>" if is_last else "<|call|>"])
            assert output.outputs[0].text == reasoning + text
            outputs.append(output)
            answer = {"role": "assistant", "content": text, "reasoning_content": reasoning}
            messages.append(answer)
            if not is_last:  # the last result begins with R
                letter = "R" if number + 1 == num_calls else "r"
                messages.append({"role": "tool", "content": letter * RESULT_TOKENS})
    return outputs


def row(name: str, outputs: list[Any]) -> dict[str, Any]:
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_cached = sum(output.num_cached_tokens for output in outputs)
    return {
        "preserve_thinking": name,
        "requests": len(outputs),
        "prompt_tokens": num_prompt,
        "cached_tokens": num_cached,
        "hit_rate": num_cached / max(1, num_prompt),
        "computed_tokens": num_prompt - num_cached,
    }


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--questions", type=int, default=4, help="of the user: %(default)s")
    parser.add_argument("--calls", type=int, default=5, help="before each answer: %(default)s")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        answers = {start: [*reasoning, *text] for start, (reasoning, text) in SCRIPT.items()}
        make_scripted_model(Path(folder), answers, TEMPLATE, max_model_len=MAX_MODEL_LEN)
        with LLM(folder, in_process=True, max_model_len=MAX_MODEL_LEN) as llm:
            for is_preserved in (False, True):
                outputs = session(
                    llm, arguments.questions, arguments.calls, is_preserved=is_preserved
                )
                name = "on" if is_preserved else "off"
                rows.append(row(name, outputs))
                rows.append(row(f"{name}, next questions", outputs[:: arguments.calls + 1][1:]))
                llm.reset_prefix_cache()
    report.write(arguments.json, rows)


if __name__ == "__main__":
    main()
