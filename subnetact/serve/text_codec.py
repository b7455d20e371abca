"""Texts and tokens: what a server does with a tokenizer, and the models of `--text`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from subnetact.engine.engine import Engine
from subnetact.errors import InvalidRequest, ServeError
from subnetact.generation import Generator, StepTable, profile_steps
from subnetact.generation import text as embedded

UNFINISHED = "\ufffd"  # what decoders write for bytes that are no character yet


class TextCodec:
    """What a text server does with a tokenizer, as `build_text_app` takes it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def prompt(self, text: str) -> list[int]:
        """Return the tokens of a text, with those that the tokenizer puts around every text."""
        found: Any = self._tokenizer.encode(text)
        return list(getattr(found, "ids", found))

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the tokens of messages with `role` and `content`, up to where the answer begins."""
        if not getattr(self._tokenizer, "chat_template", None):
            lines = [f"{message['role']}: {message['content']}" for message in messages]
            return self.prompt("\n".join([*lines, "assistant:"]))
        from jinja2 import TemplateError  # apply_chat_template needs it, too

        try:
            how = {"tokenize": True, "add_generation_prompt": True, "return_dict": False}
            return list(self._tokenizer.apply_chat_template(list(messages), **how))
        except TemplateError as error:
            raise InvalidRequest(f"messages: the chat template of the model says: {error!s:.200}") from None

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def writer(self) -> Callable[[int], str]:
        """Return a function that takes the tokens of one answer and returns the text that each adds.

        Bytes that may become a character are held back. Tokenizers of other libraries than `tokenizers`
        decode the whole answer with every token.
        """
        found = getattr(self._tokenizer, "backend_tokenizer", self._tokenizer)
        if type(found).__module__.partition(".")[0] == "tokenizers":
            from tokenizers.decoders import DecodeStream

            stream = DecodeStream(skip_special_tokens=True)
            return lambda token: stream.step(found, token) or ""
        tokens: list[int] = []
        written = 0

        def add(token: int) -> str:
            nonlocal written
            tokens.append(token)
            text = self.text(tokens)
            piece = text[written:].rstrip(UNFINISHED)
            written += len(piece)
            return piece

        return add


def text_generator(token_ms: float, max_queue: int) -> Generator:
    """Load the embedded language model; accuracy is its share of right next tokens in held-out docstrings."""
    supernet = embedded.load_text_supernet()
    subnets = embedded.switchable_subnets(supernet)
    known = {one["subnet"]: one["right_percent"] for one in embedded.text_facts()["held_out"]}
    sizes: Any = {"sequences": (1, 4, 16), "contexts": (64, 256), "prompt_tokens": (8, 64, 256), "rounds": 2}
    accuracy = [known[spec.key] for spec in subnets]
    table = profile_steps(supernet, subnets, **sizes, accuracy=accuracy, progress=False)
    return Generator(supernet, subnets, table, token_ms=token_ms, max_queue=max_queue, allow_approximate=True)


def prompt_tokenizer() -> Any:
    """Return the tokenizer of the model, which puts the token that begins texts before each of them."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    end = embedded.END
    found = Tokenizer.from_str(embedded.text_tokenizer().to_str())
    found.post_processor = TemplateProcessing(single=f"{end} $A", special_tokens=[(end, embedded.END_TOKEN)])
    return found


def bundle_generator(engine: Engine, token_ms: float, max_queue: int) -> Generator:
    """Return a generator of the subnets of a language model's bundle, by the step table that is in it."""
    table, subnets = StepTable.from_tables(engine.tables), [engine.specs[i] for i in engine.ids]
    how: Any = {"token_ms": token_ms, "max_queue": max_queue, "allow_approximate": True}
    return Generator(engine.supernet, subnets, table, **how)


def bundle_tokenizer(folder: str) -> Any:
    """Return the tokenizer whose files are in a bundle; nothing is executed or downloaded."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ServeError(
            f"--bundle {folder}: no tokenizer is in it; tokenizer.save_pretrained(folder) of transformers "
            "puts its files there"
        ) from error
