"""`python -m longshore.deploy.model.convert_tokenizer MODEL TARGET`: writes a model's tokenizer as
tokenizer.json, and its special tokens as tokenizer_config.json, into a folder.

It ends with 1 and a reason on stderr if transformers cannot convert it. No code of the model's
folder is run, and nothing is downloaded.
"""

import os
import resource
import sys
from typing import Final

MAX_MEMORY_BYTES: Final = 8 << 30
SAMPLE: Final = "the cat sat on 12 mats"


def convert(model_dir: str, target: str) -> None:
    """Raises any exception if it cannot be converted."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        model_dir, local_files_only=True, trust_remote_code=False
    )
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} cannot be written as a tokenizer.json")
    ids = tokenizer.backend_tokenizer.encode(SAMPLE, add_special_tokens=False).ids
    if not set(ids) - {tokenizer.unk_token_id}:
        raise ValueError(
            f"{type(tokenizer).__name__} does not fit the vocabulary: words have no tokens"
        )
    tokenizer.chat_template = None  # those of the folder are used
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "critical",
    }
    sys.modules["torch"] = None  # type: ignore[assignment]  # its import takes seconds
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, resource.RLIM_INFINITY))
    try:
        convert(*sys.argv[1:])
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {error}")
