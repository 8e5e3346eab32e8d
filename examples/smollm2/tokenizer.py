"""The model's tokenizer, from the GGUF file's own metadata: byte-level BPE, and the chat format it was trained on."""

from dataclasses import dataclass
from typing import Any

from gguf import GGUFReader, TokenType
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SYSTEM_PROMPT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
"""The file's chat template puts it before a conversation that has no system message of its own."""


@dataclass(frozen=True)
class ChatTokenizer:
    """Text to token ids and back. `stop_id` ends a reply."""

    tokenizer: Tokenizer
    stop_id: int

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; special tokens written out in it become themselves."""
        return self.tokenizer.encode(text).ids

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`, special tokens left out. A part of a UTF-8 character shows as U+FFFD."""
        return self.tokenizer.decode(ids)

    def encode_chat(self, prompt: str, system: str = SYSTEM_PROMPT) -> list[int]:
        """Token ids of one user message, up to where the assistant's reply begins."""
        return self.encode(chat_text(prompt, system))


def chat_text(prompt: str, system: str = SYSTEM_PROMPT) -> str:
    """The file's chat template for one user message."""
    return turn_text("system", system) + turn_text("user", prompt) + REPLY


def turn_text(role: str, text: str) -> str:
    """One finished turn of a conversation."""
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


REPLY = "<|im_start|>assistant\n"
"""Where a reply begins."""


def read_tokenizer(reader: GGUFReader) -> ChatTokenizer:
    """Builds the tokenizer that `tokenizer.ggml.*` describes.

    Raises:
      ValueError: the file asks for another kind of tokenizer.
    """

    def field(name: str) -> Any:
        return reader.fields[f"tokenizer.ggml.{name}"].contents()

    for name, known in (("model", "gpt2"), ("pre", "smollm")):
        if field(name) != known:
            raise ValueError(f"tokenizer.ggml.{name} is {field(name)!r}: this reader knows {known!r}")
    tokens = field("tokens")
    merges = [tuple(merge.split(" ")) for merge in field("merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # "smollm": every digit stands alone, then GPT-2's own split and byte alphabet.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, field("token_type"), strict=True) if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return ChatTokenizer(tokenizer, field("eos_token_id"))
