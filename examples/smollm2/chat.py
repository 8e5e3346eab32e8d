"""A conversation of several turns: each turn's prompt begins with all tokens of the turns before, whose blocks are still in the cache."""

from .tokenizer import REPLY, SYSTEM_PROMPT, ChatTokenizer, turn_text


class Conversation:
    """Token ids of a conversation, in the file's chat format. The oldest exchanges are left out when they no longer fit.

    Args:
      tokenizer: see `read_tokenizer`.
      max_prompt_tokens: most tokens of a prompt.
      system: the system message.
    """

    def __init__(self, tokenizer: ChatTokenizer, max_prompt_tokens: int, system: str = SYSTEM_PROMPT) -> None:
        self.tokenizer, self.max_prompt_tokens = tokenizer, max_prompt_tokens
        self.dropped = 0
        self._system = tokenizer.encode(turn_text("system", system))
        self._exchanges: list[list[int]] = []

    def prompt(self, message: str) -> tuple[int, ...]:
        """The ids that lead to the reply to a user message.

        Raises:
          ValueError: the message alone has more tokens than a prompt may have.
        """
        asked = self._asked(message)
        if len(self._system) + len(asked) > self.max_prompt_tokens:
            raise ValueError(f"message has {len(asked)} tokens: it must have at most {self.max_prompt_tokens - len(self._system)}")
        while self._exchanges and len(self._system) + sum(map(len, self._exchanges)) + len(asked) > self.max_prompt_tokens:
            self._exchanges.pop(0)
            self.dropped += 1
        return (*self._system, *(token for exchange in self._exchanges for token in exchange), *asked)

    def add(self, message: str, reply: list[int]) -> None:
        """Records a reply's tokens, complete or cut off."""
        end = [] if reply[-1:] == [self.tokenizer.stop_id] else [self.tokenizer.stop_id]
        self._exchanges.append([*self._asked(message), *reply, *end, *self.tokenizer.encode("\n")])

    def _asked(self, message: str) -> list[int]:
        return self.tokenizer.encode(turn_text("user", message) + REPLY)
