"""`longshore complete`: continue texts with a running server, in the terminal or a pipe."""

import asyncio
import json
import sys
from collections.abc import Iterable

from rich.console import Console

from longshore.deploy.bench.sse_client import HttpEndpoint
from longshore.deploy.cli.chat import ChatFailed, error_of, served_model, show
from longshore.deploy.cli.client_options import CompleteOptions


def complete(options: CompleteOptions) -> bool:
    """Continue `quick`, or each line of standard input. False if a text was not continued. Raises
    ChatFailed if the server cannot be reached at the start."""
    console = Console(highlight=False)
    endpoint = HttpEndpoint(options.url, api_key=options.api_key)
    model = asyncio.run(
        served_model(endpoint, options.url, options.model, timeout_s=options.timeout_s)
    )
    all_answered = True
    for text in _texts(console, options.quick):
        try:
            asyncio.run(_continue(console, endpoint, options, model.name, text))
        except ChatFailed as error:
            print(f"longshore: error: {error}", file=sys.stderr)
            all_answered = False
        else:
            console.print()
    return all_answered


def _texts(console: Console, quick: str | None) -> Iterable[str]:
    if quick is not None:
        yield quick
    elif not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin if line.strip())
    else:
        while True:
            try:
                text = input("text  ")
            except (EOFError, KeyboardInterrupt):
                console.print()
                return
            if text.strip():
                yield text


async def _continue(
    console: Console, endpoint: HttpEndpoint, options: CompleteOptions, model: str, text: str
) -> None:
    """Stream the continuation of a text. Raises ChatFailed."""
    failures: list[str] = []

    def take(data: bytes) -> None:
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            failures.append(str(event["error"]["message"]))
        else:
            show(console, "".join(choice["text"] for choice in event["choices"]))

    settings = {"max_tokens": options.max_tokens, "temperature": options.temperature}
    body = {"model": model, "prompt": text, "stream": True, **settings}
    encoded = json.dumps({name: value for name, value in body.items() if value is not None})
    try:
        answer = await endpoint.request(
            "POST",
            "/v1/completions",
            encoded.encode(),
            timeout_s=options.timeout_s,
            on_event=take,
        )
    except (OSError, TimeoutError) as error:
        raise ChatFailed(f"no answer: {error or type(error).__name__}") from error
    if failures or answer.status != 200:
        raise ChatFailed(failures[0] if failures else error_of(answer))
