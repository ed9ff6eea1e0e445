"""Commands about engines and keys that come and go, from another thread to the gateway's loop."""

import asyncio
from pathlib import Path

from longshore.deploy.gateway.engines.member_commands import MemberCommands
from longshore.protocol.commands import (
    CommandAnswer,
    EngineMember,
    ReleaseEngine,
    UseEngine,
    UseKeys,
)
from longshore.protocol.errors import EngineDead
from longshore.protocol.transport.channel import Endpoint


async def test_commands_that_came_before_the_loop_are_carried_out_first_and_failures_answered() -> (
    None
):
    commands, answers, done = MemberCommands(), [], []
    member = EngineMember(3, "unified", Endpoint("ipc://x"))

    async def add(member: EngineMember) -> None:
        await asyncio.sleep(0)
        done.append(f"add {member.number}")

    def remove(engine: int) -> None:
        if engine == 9:
            raise EngineDead("it is the only one")
        if engine == 8:
            raise OSError("too many open files")
        done.append(f"remove {engine}")

    def use_keys(path: Path) -> int:
        done.append(f"keys of {path}")
        return 5

    commands.take(0, UseEngine(member))
    task = asyncio.create_task(commands.run(add, remove, use_keys, answers.append))
    await asyncio.to_thread(commands.take, 1, ReleaseEngine(8))
    await asyncio.to_thread(commands.take, 2, ReleaseEngine(3))
    await asyncio.to_thread(commands.take, 3, ReleaseEngine(9))
    await asyncio.to_thread(commands.take, 4, UseKeys("/k"))
    async with asyncio.timeout(60):
        while len(answers) < 5:
            await asyncio.sleep(0.01)
    task.cancel()
    assert done == ["add 3", "remove 3", "keys of /k"]
    assert answers == [
        CommandAnswer(0, True, "uses engine 3"),
        CommandAnswer(1, False, "OSError: too many open files; the gateway's log has the cause"),
        CommandAnswer(2, True, "does not use engine 3 any more"),
        CommandAnswer(3, False, "it is the only one"),
        CommandAnswer(4, True, "has 5 API keys"),
    ]
