"""Prompts, chats and answers go through the tokenizer as its authors meant."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi", reason="serving needs the extra `serve`")

from subnetact.errors import InvalidRequest
from subnetact.generation.text import text_tokenizer
from subnetact.serve.text_codec import TextCodec, TextWriter
from subnetact.serve.text_model import prompt_tokenizer

CHAT = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "größer?"}]
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ raise_exception('only users speak') }}{% endif %}"
    "<{{ message['role'] }}>{{ message['content'] }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def transformers_tokenizer(**options: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=prompt_tokenizer(), **options)


def test_prompts_begin_with_the_token_that_begins_texts() -> None:
    plain = text_tokenizer().encode("a = 1").ids
    assert TextCodec(prompt_tokenizer()).prompt("a = 1") == [0, *plain]
    assert TextCodec(transformers_tokenizer()).prompt("a = 1") == [0, *plain]
    assert text_tokenizer().encode("a = 1").ids == plain, "the shared tokenizer stays as it is"


def test_a_chat_template_makes_the_prompt() -> None:
    codec = TextCodec(transformers_tokenizer(chat_template=TEMPLATE))
    expected = "<system>Be short.</><user>größer?</><assistant>"
    assert codec.chat(CHAT) == text_tokenizer().encode(expected).ids, "the template has all special tokens"
    with pytest.raises(InvalidRequest, match="only users speak"):
        codec.chat([{"role": "assistant", "content": "no"}])


@pytest.mark.parametrize("make", [prompt_tokenizer, transformers_tokenizer])
def test_without_a_template_every_message_is_a_line_with_its_role(make: Any) -> None:
    codec = TextCodec(make())
    assert codec.chat(CHAT) == codec.prompt("system: Be short.\nuser: größer?\nassistant:")


def test_the_pieces_of_any_tokens_are_the_text_of_all() -> None:
    tokenizer, source = text_tokenizer(), random.Random(0)
    every = range(tokenizer.get_vocab_size())
    halves = [token for token in every if "\ufffd" in tokenizer.decode([token])]
    assert len(halves) > 100
    for _ in range(200):
        share = source.choice((0.0, 0.3, 1.0))
        kinds = (halves if source.random() < share else every for _ in range(source.randrange(150)))
        tokens = [source.choice(kind) for kind in kinds]
        writer = TextCodec(tokenizer).writer()
        assert "".join(map(writer.add, tokens)) + writer.end() == tokenizer.decode(tokens)


def test_pieces_end_with_whole_characters() -> None:
    tokenizer = text_tokenizer()
    text = "größer 你好, help(json.dumps) 🙂 " * 20
    writer, shown = TextCodec(tokenizer).writer(), ""
    for token in tokenizer.encode(text).ids:
        shown += writer.add(token)
        assert text.startswith(shown)
    assert shown + writer.end() == text


def test_a_long_text_costs_no_more_per_token_than_a_short_one() -> None:
    given: list[int] = []

    def decode(tokens: list[int]) -> str:
        given.append(len(tokens))
        return "".join(map(chr, tokens))

    writer = TextWriter(decode)
    assert "".join(writer.add(97 + i % 26) for i in range(1000)).startswith("abcdef")
    assert max(given) <= 32
    unfinished = TextWriter(lambda tokens: "\ufffd" * len(tokens))
    assert "".join(unfinished.add(0) for _ in range(1000)) + unfinished.end() == "\ufffd" * 1000


def test_special_tokens_are_not_shown() -> None:
    seen: dict[str, Any] = {}
    tokenizer = SimpleNamespace(decode=lambda tokens, **options: seen.update(options) or "")
    assert TextCodec(tokenizer).writer().add(1) == ""
    assert seen == {"skip_special_tokens": True}
