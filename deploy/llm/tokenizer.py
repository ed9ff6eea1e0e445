"""The tokenizer that `LLM.get_tokenizer` returns: what scripts use of a Hugging Face tokenizer."""

from collections.abc import Mapping, Sequence
from typing import Any

from longshore.deploy.gateway.text.tokenizer import ModelTokenizer
from longshore.deploy.llm.chats import ChatParameters, Message, other_template, rendered_chat


class Tokenizer:
    """A model's tokenizer, with method names and defaults of a Hugging Face tokenizer. For the
    rest, load one with `transformers.AutoTokenizer`."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer

    def __len__(self) -> int:
        return self._tokenizer.num_ids

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.num_ids

    @property
    def bos_token(self) -> str | None:
        return self._tokenizer.chat_template.special_tokens.get("bos_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._tokenizer.added_tokens.get(self.bos_token or "")

    @property
    def eos_token(self) -> str | None:
        return self._tokenizer.chat_template.special_tokens.get("eos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._tokenizer.added_tokens.get(self.eos_token or "")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The text's token ids, with the special tokens that the model's texts begin with."""
        if add_special_tokens:
            return self._tokenizer.encode(text)
        return self._tokenizer.encode_rendered(text)

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        if skip_special_tokens:
            ids = [each for each in ids if each not in self._tokenizer.special_token_ids]
        return self._tokenizer.decode(ids)

    def batch_decode(
        self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = False
    ) -> list[str]:
        return [self.decode(token_ids, skip_special_tokens) for token_ids in sequences]

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> str | list[int]:
        """The prompt of a chat, as token ids, or as text with tokenize=False. Raises ValueError."""
        template = self._tokenizer.chat_template
        if chat_template is not None:
            template = other_template(chat_template, template)
        parameters = ChatParameters(add_generation_prompt, continue_final_message, tools, variables)
        text = rendered_chat(template, conversation, parameters, "conversation")
        return self._tokenizer.encode_rendered(text) if tokenize else text
