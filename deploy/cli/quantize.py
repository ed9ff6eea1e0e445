"""`longshore quantize`."""

import shutil
import tempfile
from pathlib import Path

from rich.console import Console

from longshore.deploy.cli.client_options import QuantizeOptions
from longshore.deploy.llm.llm import LLM
from longshore.deploy.llm.perplexity import default_text, perplexity, text_tokens
from longshore.deploy.model.folder import ModelFolder, read_model_folder
from longshore.protocol.errors import ConfigError
from longshore.worker.loading.checkpoint import find_weights
from longshore.worker.loading.gguf_files import has_gguf
from longshore.worker.loading.quantise import Quantised, Scheme, quantise
from longshore.worker.models.families import read_model_config
from longshore.worker.process.byte_size import byte_size


def run(model: str, options: QuantizeOptions) -> None:
    """Write the quantised model, and print its size and perplexity. Raises ConfigError."""
    folder = read_model_folder(model)
    _check(folder, options.out)
    scheme = Scheme(options.to, options.group_size)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    # Beside the result, to which it is renamed once it is complete.
    made = Path(tempfile.mkdtemp(prefix=f".{options.out.name}.", dir=options.out.parent))
    try:
        done = quantise(
            folder.path, read_model_config(folder.path), scheme, made, show_progress=None
        )
        made.chmod(0o755)
        options.out.rmdir() if options.out.is_dir() else None
        made.rename(options.out)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    console = Console(highlight=False, soft_wrap=True)
    console.print(_summary(folder, options.out, scheme, done))
    if options.perplexity:
        text = default_text() if options.text is None else options.text.read_text(encoding="utf-8")
        _print_perplexities(console, folder.path, options.out, text)


def _check(folder: ModelFolder, out: Path) -> None:
    if has_gguf(folder.path):
        raise ConfigError(
            f"{folder.name} is a GGUF file. Quantise its checkpoint in Hugging Face format, or use "
            "llama.cpp's llama-quantize"
        )
    if (method := find_weights(folder.path).method) is not None:
        raise ConfigError(f"{folder.name} is quantised already ({method}). Use one in floats")
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not an empty folder. Give another one with --out")


def _summary(folder: ModelFolder, out: Path, scheme: Scheme, done: Quantised) -> str:
    before = find_weights(folder.path).num_file_bytes
    lines = [
        f"{out}: {done.num_matrices} matrices in {scheme.kind}, "
        f"{byte_size(done.num_bytes)} instead of {byte_size(before)}"
    ]
    reasons: dict[str, list[str]] = {}
    for module, reason in done.kept.items():
        reasons.setdefault(reason, []).append(module)
    for reason, modules in reasons.items():
        others = f" and {len(modules) - 1} others" if len(modules) > 1 else ""
        lines.append(f"as before, {reason}: {modules[0]}{others}")
    return "\n".join(lines)


def _print_perplexities(console: Console, before: Path, after: Path, text: str) -> None:
    found, tokens = [], None
    for path in (before, after):
        with LLM(path) as llm:
            tokens = tokens or text_tokens(llm, text)
            found.append(perplexity(llm, tokens))
    first, second = found
    assert tokens is not None
    console.print(
        f"perplexity of {len(tokens):,} tokens: {first:.3f} before, {second:.3f} after "
        f"({second / first - 1:+.2%})"
    )
