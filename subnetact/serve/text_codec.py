"""TextCodec: prompts and chats become tokens, and tokens become text as they come."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from subnetact.errors import InvalidRequest

__all__ = ["TextCodec", "TextWriter"]

UNFINISHED = "\ufffd"
"""What decoders write for bytes that are no character yet."""
CHARACTER = 3
"""The most bytes of a character that may still be unfinished."""
WINDOW = 16
"""How many tokens before the last ones are decoded with them, so that they read as in the whole text."""


class TextCodec:
    """What a text server does with a tokenizer.

    Args:
        tokenizer: of `tokenizers` or `transformers`, or another object with `encode(text)` and
            `decode(tokens, skip_special_tokens=True)`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def prompt(self, text: str) -> list[int]:
        """Return the tokens of a text, with those that the tokenizer puts around every text."""
        found: Any = self._tokenizer.encode(text)
        return list(getattr(found, "ids", found))

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the tokens of a chat, up to where the answer begins.

        The chat template of the tokenizer is used if it has one. Otherwise every message is a line, the role,
        a colon and the content, and the last line is `assistant:`.

        Args:
            messages: messages, each with `role` and `content`.

        Raises:
            InvalidRequest: the template of the tokenizer refuses the messages.
        """
        if not getattr(self._tokenizer, "chat_template", None):
            lines = [f"{message['role']}: {message['content']}" for message in messages]
            return self.prompt("\n".join([*lines, "assistant:"]))
        from jinja2 import TemplateError  # apply_chat_template needs it, too

        try:
            return list(
                self._tokenizer.apply_chat_template(
                    list(messages), tokenize=True, add_generation_prompt=True, return_dict=False
                )
            )
        except TemplateError as error:
            raise InvalidRequest(f"messages: the chat template of the model says: {error!s:.200}") from None

    def writer(self) -> TextWriter:
        """Return what writes the text of one answer."""
        return TextWriter(lambda tokens: self._tokenizer.decode(tokens, skip_special_tokens=True))


class TextWriter:
    """Writes the text of tokens as they come. The time per token does not grow with the text.

    Only the last tokens are decoded with every new one. Bytes that may become a character are held back.

    Args:
        decode: a function from a list of tokens to their text.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._written = 0  # characters of the text of these tokens

    def add(self, token: int) -> str:
        """Return the text that a token adds; it may be empty.

        Args:
            token: the next token.
        """
        self._tokens.append(token)
        text = self._decode(self._tokens)
        unfinished = len(text) - len(text.rstrip(UNFINISHED))
        piece = self._upto(text, len(text) - min(unfinished, CHARACTER))
        if len(self._tokens) >= 2 * WINDOW:
            left = len(text) - self._written
            del self._tokens[:-WINDOW]
            self._written = max(0, len(self._decode(self._tokens)) - left)
        return piece

    def end(self) -> str:
        """Return the text that was held back."""
        text = self._decode(self._tokens)
        return self._upto(text, len(text))

    def _upto(self, text: str, end: int) -> str:
        piece = text[self._written : end]
        self._written = max(self._written, end)
        return piece
