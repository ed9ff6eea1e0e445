"""`python -m longshore.deploy.machine.probe NAME`: imports one optional library and prints facts.

Run as a child process, because some libraries crash or hang on import. The last line of the output
has the facts as JSON, after `MARK`, because the libraries print too.
"""

import json
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

MARK: Final = "longshore-probe: "

Facts = dict[str, Any]


def _torch() -> Facts:
    """driver_cuda: newest CUDA version that the driver supports, such as 13000; 0 without one."""
    torch = import_module("torch")
    facts: Facts = {"cuda": torch.version.cuda, "driver_cuda": 0, "devices": []}
    if torch.version.cuda is not None:
        facts["driver_cuda"] = torch._C._cuda_getDriverVersion()
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            free_bytes, total_bytes = torch.cuda.mem_get_info(index)
            name = torch.cuda.get_device_name(index)
            facts["devices"].append({"name": name, "total": total_bytes, "free": free_bytes})
    return facts


def _nixl() -> Facts:
    """plugins: all listed plugins; usable: those of UCX and POSIX that can be created."""
    api = import_module("nixl._api")
    agent = api.nixl_agent("longshore-doctor", api.nixl_agent_config(backends=[]))
    plugins, usable, unusable = list(agent.get_plugin_list()), [], {}
    for name in ("UCX", "POSIX"):  # the list also has plugins that cannot be loaded
        try:
            agent.create_backend(name)
            usable.append(name)
        except Exception as error:
            unusable[name] = str(error)
    return {"plugins": plugins, "usable": usable, "unusable": unusable}


def _cuda() -> Facts:
    import_module("longshore.connectors.pull.p2p.nccl").load_cupy()
    return {}


def _importing(*names: str) -> Callable[[], Facts]:
    def load() -> Facts:
        for name in names:
            import_module(name)
        return {}

    return load


PROBES: Final[dict[str, Callable[[], Facts]]] = {
    "torch": _torch,
    "audio": _importing("soundfile", "soxr"),
    "nixl": _nixl,
    "mooncake": _importing("mooncake.engine"),
    "cuda": _cuda,
    "lmcache": _importing("lmcache.v1.distributed.storage_manager"),
    "otel": _importing("longshore.deploy.requests.spans"),
    "ray": _importing("ray"),
    "s3": _importing("obstore"),
    "tokenizers": _importing("sentencepiece", "tiktoken"),
    "xgrammar": _importing("xgrammar"),
}


def main() -> int:
    """Exit status 0: loaded; 1: not loaded, with the reason in the last line."""
    (name,) = sys.argv[1:]
    try:
        facts = PROBES[name]()
    except Exception as error:
        facts = {"failure": f"{type(error).__name__}: {error}"}
    print(f"\n{MARK}{json.dumps(facts)}", flush=True)
    return int("failure" in facts)


if __name__ == "__main__":
    sys.exit(main())
