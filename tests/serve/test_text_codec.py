"""Prompts, chats and answers go through the tokenizer as its authors meant."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("starlette", reason="serving needs the extra `serve`")

from subnetact.errors import InvalidRequest
from subnetact.generation.text import text_tokenizer
from subnetact.serve.text_codec import TextCodec, prompt_tokenizer

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


@pytest.mark.parametrize("make", [text_tokenizer, transformers_tokenizer])
def test_the_pieces_of_any_tokens_are_the_text_of_all_but_an_unfinished_character(make: Any) -> None:
    tokenizer, plain, source = make(), text_tokenizer(), random.Random(0)
    every = range(plain.get_vocab_size())
    halves = [token for token in every if "\ufffd" in plain.decode([token])]
    assert len(halves) > 100
    for _ in range(200):
        share = source.choice((0.0, 0.3, 1.0))
        kinds = (halves if source.random() < share else every for _ in range(source.randrange(150)))
        tokens = [source.choice(kind) for kind in kinds]
        text = plain.decode(tokens)
        pieces = "".join(map(TextCodec(tokenizer).writer(), tokens))
        assert text.startswith(pieces)
        assert set(text[len(pieces) :]) <= {"\ufffd"}


class Bytes:
    """A tokenizer of another library."""

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return bytes(tokens).decode(errors="replace")


def test_pieces_end_with_whole_characters() -> None:
    text = "größer 你好, help(json.dumps) 🙂 " * 20
    for tokenizer, tokens in (
        (text_tokenizer(), text_tokenizer().encode(text).ids),
        (Bytes(), text.encode()),
    ):
        writer, shown = TextCodec(tokenizer).writer(), ""
        for token in tokens:
            shown += writer(token)
            assert text.startswith(shown)
        assert shown == text


def test_a_long_text_costs_no_more_per_token_than_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder that remembers is used: nothing is decoded a second time."""
    codec = TextCodec(text_tokenizer())
    monkeypatch.setattr(codec, "text", lambda tokens: pytest.fail("decoded all tokens"))
    assert "".join(map(codec.writer(), text_tokenizer().encode("abc " * 300).ids)) == "abc " * 300


def test_special_tokens_are_not_shown() -> None:
    for make in (prompt_tokenizer, transformers_tokenizer):
        assert "".join(map(TextCodec(make()).writer(), [0, *text_tokenizer().encode("a b").ids, 0])) == "a b"
