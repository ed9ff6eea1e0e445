"""Log handlers: one line per record. The supervisor adds time and name to what others print."""

import logging
import sys
from typing import Final

RELAYED: Final = "%(levelname)s %(name)s: %(message)s"
OWN: Final = "%(asctime)s [supervisor] " + RELAYED


def set_up_logging(level: str, line_format: str = RELAYED) -> None:
    """Send records of `level` and above to standard error."""
    logging.basicConfig(
        level=level.upper(),
        stream=sys.stderr,
        format=line_format,
        datefmt="%H:%M:%S",
        force=True,
    )
    for noisy in ("asyncio", "uvicorn.error"):
        logging.getLogger(noisy).setLevel(max(logging.getLogger().level, logging.WARNING))
    # It warns of every form that is none, which the client is told: logs are not for clients.
    parser = logging.getLogger("python_multipart")
    parser.setLevel(max(logging.getLogger().level, logging.ERROR))
