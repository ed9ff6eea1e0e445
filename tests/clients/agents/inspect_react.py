"""inspect-ai, whose agent `react` ends a task by a call of `submit`."""

import os

import inspect_ai
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.tool import Tool, tool
from task import MODEL, QUESTION, URL, done
from task import list_files as list_them
from task import read_file as read_it
from task import write_file as write_it


@tool
def list_files() -> Tool:
    async def execute() -> str:
        """The names of all files."""
        return list_them()

    return execute


@tool
def read_file() -> Tool:
    async def execute(name: str) -> str:
        """The text of a file.

        Args:
            name: Its name.
        """
        return read_it(name)

    return execute


@tool
def write_file() -> Tool:
    async def execute(name: str, text: str) -> str:
        """Write a text to a file.

        Args:
            name: Its name.
            text: What it will hold.
        """
        return write_it(name, text)

    return execute


os.environ |= {"LOCAL_API_KEY": "none", "LOCAL_BASE_URL": f"{URL}/v1"}
(log,) = inspect_ai.eval(
    inspect_ai.Task(
        dataset=[Sample(input=QUESTION)],
        solver=react(tools=[list_files(), read_file(), write_file()]),
    ),
    model=f"openai-api/local/{MODEL}",
    display="none",
    log_dir="logs",
)
assert log.status == "success", log.error
assert log.samples
done("inspect-ai", log.samples[0].output.completion)
