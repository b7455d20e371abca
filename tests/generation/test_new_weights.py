"""A generator follows the weights: sequences under way are computed again, later ones see the new ones."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from generation_tables import step_table
from held_steps import steer

from subnetact.device import MachineFacts
from subnetact.errors import BatcherClosed, BatchFailed
from subnetact.generation import Generator
from subnetact.operators import kernel_table
from subnetact.spec import SubnetSpec
from subnetact.supernet.supernet import Supernet

pytest.importorskip("transformers")
LONG = {"first_ms": 60_000.0, "token_ms": 60_000.0}
PROMPT = [5, 6, 7, 8]
AT = 4


def load(supernet: Supernet) -> None:
    generator = torch.Generator().manual_seed(9)
    state = supernet.state_dict()
    drawn = {
        n: 0.4 * torch.randn(t.shape, generator=generator) if t.dim() > 1 else t for n, t in state.items()
    }
    supernet.load_state_dict(drawn)


def in_place(supernet: Supernet) -> None:
    with torch.no_grad():
        for parameter in supernet.parameters():
            if parameter.dim() > 1 and parameter.shape[0] != 97:
                parameter.mul_(-1.2)


def unseen(supernet: Supernet) -> None:
    for parameter in supernet.parameters():
        if parameter.dim() > 1 and parameter.shape[0] != 97:
            parameter.data.mul_(-1.2)
    supernet.refresh()


def changing(generator: Generator, change: Callable[[], None]) -> None:
    """Change the weights when a step chooses the only subnet."""
    numbers = itertools.count(1)

    def choose() -> int:
        if next(numbers) == AT:
            change()
        return 0

    steer(generator._scheduler.policy, choose)


def following(network: Any, tokens: list[int], count: int) -> list[int]:
    made = network.generate(torch.tensor([tokens]), max_new_tokens=count, do_sample=False)
    return list(made[0, len(tokens) :].tolist())


@pytest.mark.parametrize("change", [load, in_place, unseen])
def test_a_generator_follows_the_weights(
    llama: Supernet, widths: list[SubnetSpec], change: Callable[[Supernet], None]
) -> None:
    supernet, spec = copy.deepcopy(llama), widths[1]
    table = step_table([spec.key], (50.0,))
    former: Any = supernet.extract(spec)
    expected = following(former, PROMPT, 12)
    with Generator(supernet, [spec], table, token_ms=50.0) as generator:
        changing(generator, lambda: change(supernet))
        tokens = list(generator.submit(PROMPT, max_new_tokens=12, **LONG).result(60).tokens)
        assert tokens[: AT - 1] == expected[: AT - 1]
        # A step that has begun ends on the weights that were loaded before, or on those that were changed.
        present: Any = supernet.extract(spec)
        if change is load:
            assert tokens[:AT] == expected[:AT]
        assert tokens[AT:] == following(present, [*PROMPT, *tokens[:AT]], 12 - AT)
        later = list(generator.submit(PROMPT, max_new_tokens=12, **LONG).result(60).tokens)
        assert later == following(present, PROMPT, 12) != expected
        assert generator.stats().failed == 0


def test_a_generator_goes_on_when_precisions_are_enabled(
    llama: Supernet, widths: list[SubnetSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_table, "machine_facts", lambda _: MachineFacts(reference=True))
    supernet, spec = copy.deepcopy(llama), widths[1]
    table = step_table([spec.key], (50.0,))
    with Generator(supernet, [spec], table, token_ms=50.0) as generator:
        changing(generator, lambda: supernet.enable_precision("int8"))
        for _ in range(2):
            tokens = list(generator.submit(PROMPT, max_new_tokens=8, **LONG).result(60).tokens)
            assert tokens == following(llama.extract(spec), PROMPT, 8)


def test_a_generator_says_that_its_cache_is_of_another_dtype(
    llama: Supernet, widths: list[SubnetSpec]
) -> None:
    supernet, spec = copy.deepcopy(llama), widths[1]
    with Generator(supernet, [spec], step_table([spec.key], (50.0,)), token_ms=50.0) as generator:
        supernet.to(torch.float64)
        with pytest.raises((BatchFailed, BatcherClosed), match="make another Generator"):
            generator.submit(PROMPT, max_new_tokens=8, **LONG).result(60)
        assert not generator.stats().up
