"""Buffers that a forward writes are its state: every view has its own, and they are no weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from generation_tables import step_table
from small_decoders import small_decoder
from torch import Tensor, nn
from written_networks import seeded

import subnetact
from subnetact.generation import Generator
from subnetact.supernet.supernet import Supernet

pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UnprovedInputWarning")
WIDTH = 8
SHORT = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
LONG = torch.randn(9, WIDTH, generator=torch.Generator().manual_seed(2)) + 3
IDS = torch.arange(3, 9).view(1, 6)
LONG_IDS = torch.arange(3, 43).view(1, 40)


def inner(m: Any, x: Tensor) -> Tensor:
    return m.wide(m.narrow(x).relu())  # type: ignore[no-any-return]


def centred(m: Any, x: Tensor) -> Tensor:
    """Write the mean of the input before the layers, and read it afterwards."""
    m.centre.copy_(x.detach().mean(0))
    return inner(m, x) - m.centre


def counting(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    return inner(m, x)


def masked(m: Any, x: Tensor) -> Tensor:
    """Keep a mask for as many rows as were seen, which is no part of the state_dict."""
    if len(x) > len(m.mask):
        m.mask = torch.tril(torch.ones(len(x), len(x)))
    return m.mask[: len(x), : len(x)] @ inner(m, x)


def tied(m: Any, x: Tensor) -> Tensor:
    """Write a buffer through one module and read it through another one."""
    m.writer.of.copy_(x.detach().amax(0))
    return inner(m, x) * m.reader.of


Kind = Callable[[Any, Tensor], Tensor]
NETWORKS: dict[Kind, set[str]] = {
    centred: {"centre"},
    counting: {"calls"},
    masked: set(),  # What is assigned to a view is the view's alone.
    tied: {"writer.of", "reader.of"},
}
KINDS = pytest.mark.parametrize("kind", [centred, masked, tied])
"""The networks whose answers do not depend on how often they were called."""


def stateful(kind: Kind) -> nn.Module:
    """Return two layers with an elastic width between them, and a state around them."""
    network: Any = seeded(
        kind, narrow=(WIDTH, 32), wide=(32, WIDTH), writer=nn.Identity(), reader=nn.Identity()
    )
    of = torch.zeros(WIDTH)
    for holder in (network.writer, network.reader) if kind is tied else ():
        holder.register_buffer("of", of)
    if kind is centred:
        network.register_buffer("centre", of)
    if kind is counting:
        network.register_buffer("calls", torch.zeros((), dtype=torch.long))
    if kind is masked:
        network.register_buffer("mask", torch.tril(torch.ones(4, 4)), persistent=False)
    return network  # type: ignore[no-any-return]


def inserted(kind: Kind) -> tuple[Supernet, nn.Module]:
    """Return a supernet, and an ordinary copy of its network that has not run."""
    network = stateful(kind)
    plain = copy.deepcopy(network)
    return subnetact.insert_(network, example=SHORT), plain


@pytest.mark.parametrize("kind", NETWORKS)
def test_state_is_found_and_is_no_weight(kind: Kind) -> None:
    supernet, plain = inserted(kind)
    assert supernet.state == NETWORKS[kind]
    assert supernet.state_dict().keys() == plain.state_dict().keys()
    moment, number = supernet.generation.moment(), supernet.generation.number
    kept = {name: tensor.clone() for name, tensor in supernet.state_dict().items()}
    for spec in (supernet.space.smallest(), supernet.space.largest()):
        for x in (SHORT, LONG, SHORT):
            supernet(x, subnet=spec)
    assert (moment, number) == (supernet.generation.moment(), supernet.generation.number)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in supernet.state_dict().items())


@KINDS
def test_the_largest_subnet_goes_through_the_states_of_the_original(kind: Kind) -> None:
    supernet, plain = inserted(kind)
    view = supernet.subnet(supernet.space.largest())
    for x in (SHORT, LONG, SHORT):
        torch.testing.assert_close(view(x), plain(x), rtol=1e-5, atol=5e-5)


@KINDS
@pytest.mark.parametrize("made", ["inserted", "copied", "read", "by hand"])
def test_views_that_run_at_once_leave_each_other_alone(kind: Kind, made: str, tmp_path: Path) -> None:
    supernet, plain = inserted(kind)
    if made == "copied":
        supernet = copy.deepcopy(supernet)
    elif made == "read":
        supernet.save_pretrained(tmp_path)
        supernet = subnetact.from_pretrained(tmp_path, model=plain)  # type: ignore[assignment]
    elif made == "by hand":
        description = supernet.description
        supernet = subnetact.insert_(plain, description.space, description.elastic, example=SHORT)
    small, large = (supernet.subnet(s) for s in (supernet.space.smallest(), supernet.space.largest()))
    alone = supernet.extract(supernet.space.smallest())(SHORT)

    def meanwhile(*_: Any) -> None:
        large(LONG)

    small.get_submodule("wide").register_forward_pre_hook(meanwhile)  # between its write and its read
    torch.testing.assert_close(small(SHORT), alone, rtol=1e-5, atol=5e-5)


def test_views_count_their_own_calls() -> None:
    supernet, plain = inserted(counting)
    small, large = (supernet.subnet(s) for s in (supernet.space.smallest(), supernet.space.largest()))
    began = large.get_buffer("calls").clone()
    for _ in range(3):
        large(SHORT)
    assert int(large.get_buffer("calls") - began) == 3
    assert torch.equal(small.get_buffer("calls"), began)
    assert supernet.remove().state_dict().keys() == plain.state_dict().keys()


def test_an_engine_runs_a_network_with_a_state_as_a_view_and_shows_it_by_its_check() -> None:
    supernet, _ = inserted(centred)
    by_hand = subnetact.insert_(stateful(centred), supernet.space, dict(supernet.description.elastic))
    assert not by_hand.state
    engine = subnetact.Engine(by_hand, [by_hand.space.smallest()], example=SHORT[:1])
    assert by_hand.state == {"centre"}
    assert engine.pin(0).reason == "its forward changes its own buffers"
    for x in (SHORT, LONG, SHORT):
        torch.testing.assert_close(engine(x, 0), by_hand.extract(by_hand.space.smallest())(x))


def test_a_supernet_that_runs_another_subnet_is_checked_as_any_other(digits: Supernet) -> None:
    """While a network itself runs a narrow subnet, it puts statistics back: no write of its forward."""
    x = torch.zeros(1, 1, 16, 16).normal_(generator=torch.Generator().manual_seed(0))
    small = digits.space.smallest()
    subnetact.calibrate(digits, [small], [x.expand(4, -1, -1, -1)], progress=False)
    digits.actuate(small)
    digits.check(x, thorough=False)
    assert not digits.state
    assert subnetact.Engine(digits, [small], example=x, memory_budget_mb=64).pin(0)


THETA = {"rope_theta": 1e4}
FACTORS = {"short_factor": [1.0, 1.0], "long_factor": [2.0, 3.0], "original_max_position_embeddings": 16}
ROTARY: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": (
        "Phi3Config",
        {
            **{"tie_word_embeddings": False, "original_max_position_embeddings": 16},
            "rope_parameters": {"rope_type": "longrope", **THETA, **FACTORS},
        },
    ),
    "dynamic": (
        "LlamaConfig",
        {"max_position_embeddings": 16, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, **THETA}},
    ),
}


def decoder(kind: str) -> nn.Module:
    pytest.importorskip("transformers")
    config, settings = ROTARY[kind]
    return small_decoder(config, num_hidden_layers=2, **settings)


def tokens(model: Any) -> list[int]:
    options = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    found: list[int] = model.generate(IDS, **options)[0, IDS.shape[1] :].tolist()
    return found


@pytest.mark.parametrize("kind", ROTARY)
def test_rotary_embeddings_of_long_contexts_are_those_of_the_original(kind: str) -> None:
    supernet = subnetact.insert_(decoder(kind), example=LONG_IDS[:, :6], axes=("ffn",))
    small, large = supernet.space.smallest(), supernet.space.largest()
    view, plain = supernet.subnet(large), decoder(kind)
    for ids in (LONG_IDS, IDS, LONG_IDS):
        expected = plain(ids, use_cache=False).logits
        torch.testing.assert_close(view(ids, use_cache=False).logits, expected, rtol=1e-5, atol=5e-5)
    for _ in range(2):  # Past the length at which the frequencies change, and from the beginning again.
        assert tokens(view) == tokens(supernet.extract(large)) == tokens(decoder(kind))
    assert tokens(supernet.subnet(small)) == tokens(supernet.extract(small))


def test_a_generator_forgets_keys_of_other_frequencies() -> None:
    supernet = subnetact.insert_(decoder("longrope"), example=IDS, axes=("ffn",))
    spec = supernet.space.largest()
    with Generator(supernet, [spec], step_table([spec.key], (50.0,)), token_ms=1e6) as generator:
        answer = generator.submit(IDS[0].tolist(), max_new_tokens=20, first_ms=1e6).result(60.0)
    assert list(answer.tokens) == tokens(decoder("longrope"))
