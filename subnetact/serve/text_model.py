"""The embedded language model as a generator that is ready to serve: `python -m subnetact.serve --text`."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from subnetact.generation import Generator, profile_steps
from subnetact.generation.text import (
    END,
    end_of_text,
    load_text_supernet,
    switchable_subnets,
    text_facts,
    text_tokenizer,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["prompt_tokenizer", "text_generator"]


def text_generator(token_ms: float, max_queue: int) -> Generator:
    """Load the embedded language model and measure its steps on this machine.

    The accuracy of a subnet is the share of next tokens of held-out docstrings that it predicts right.
    """
    supernet = load_text_supernet()
    subnets = switchable_subnets(supernet)
    known = {one["subnet"]: one["right_percent"] for one in text_facts()["held_out"]}
    table = profile_steps(
        supernet,
        subnets,
        sequences=(1, 4, 16),
        contexts=(64, 256),
        prompt_tokens=(8, 64, 256),
        accuracy=[known[str(spec)] for spec in subnets],
        rounds=2,
        progress=False,
    )
    return Generator(supernet, subnets, table, token_ms=token_ms, max_queue=max_queue, allow_approximate=True)


@lru_cache(maxsize=1)
def prompt_tokenizer() -> Tokenizer:
    """Return the tokenizer of the model, which puts the token that begins texts before each of them."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    found = Tokenizer.from_str(text_tokenizer().to_str())
    found.post_processor = TemplateProcessing(single=f"{END} $A", special_tokens=[(END, end_of_text())])
    return found
