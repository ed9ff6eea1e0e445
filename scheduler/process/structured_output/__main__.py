"""`python -m longshore.scheduler.process.structured_output`: the grammar process of a scheduler,
which starts it and writes its configuration to its standard input."""

import ctypes
import logging
import signal
import sys
from pathlib import Path

import msgspec
import zmq

from longshore.protocol.grammars import ToGrammarProcess
from longshore.protocol.logs.records import send_records
from longshore.protocol.requests import StructuredOutput
from longshore.protocol.transport.channel import Channel, open_socket
from longshore.protocol.transport.lifeline import Lifeline, stop_signals
from longshore.scheduler.config import GrammarProcessConfig
from longshore.scheduler.features.grammar import GrammarError
from longshore.scheduler.process.structured_output.backends import Backends
from longshore.scheduler.process.structured_output.matcher import CompiledGrammar
from longshore.scheduler.process.structured_output.process import Compiler, GrammarServer
from longshore.scheduler.process.structured_output.schema_support import installed_backends
from longshore.scheduler.process.structured_output.vocabulary import load_vocabulary
from longshore.scheduler.process.structured_output.work_page import WorkPage

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


class Unusable:
    """Compiles nothing, because the model's tokens cannot be described."""

    is_loaded = True

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def compile(self, spec: StructuredOutput) -> CompiledGrammar:
        raise GrammarError(self._reason)


def main() -> int:
    """Exit status 1 if it cannot go on; else it is killed, or ends with its lifeline."""
    # The lifeline ends this process, unless a backend keeps the interpreter lock.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=GrammarProcessConfig)
    stop_signals(config.lifeline_fd)
    Lifeline(config.lifeline_fd)
    send_records(config.log_level, is_relayed=config.is_relayed, engine=config.engine)
    settings = config.structured_output
    compiler: Compiler
    try:
        vocabulary = load_vocabulary(
            Path(settings.tokenizer_file),
            vocab_size=config.vocab_size,
            eos_token_ids=config.eos_token_ids,
        )
        compiler = backends = Backends(
            installed_backends(settings.structured_output_backend), vocabulary
        )
        backends.load_first()
    except GrammarError as error:
        compiler = Unusable(str(error))
    except Exception as error:  # of a library that cannot be imported
        logger.exception("structured output is not possible")
        compiler = Unusable(f"structured output is not possible on this server: {error!r}")
    socket = open_socket(zmq.Context(), zmq.DEALER, settings.endpoint, bind=False)
    page = WorkPage(config.page_fd)
    GrammarServer(config, Channel(socket, ToGrammarProcess), compiler, page).run()
    return 1


if __name__ == "__main__":
    sys.exit(main())
