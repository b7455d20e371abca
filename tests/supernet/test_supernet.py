"""Views compute what extracted networks compute, share the storage, and run in many threads at once."""

from __future__ import annotations

import copy
import gc
import random
import threading
import warnings
import weakref

import pytest
import torch
import torch.nn.utils.parametrize
from torch import nn

import subnetact
from subnetact.digits import new_digits_supernet
from subnetact.errors import (
    CheckpointError,
    ForeignSpec,
    SpecError,
    UncalibratedSubnetWarning,
    ViewError,
)
from subnetact.operators.view_module import mix_in_
from subnetact.supernet.supernet import Supernet

pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")
X = torch.randn(4, 1, 16, 16, generator=torch.Generator().manual_seed(1))


def specs_of(supernet: Supernet, count: int = 12, seed: int = 0) -> list[subnetact.SubnetSpec]:
    return supernet.space.sample(seed, count + 2)


def test_view_equals_extracted_equals_actuated(digits: Supernet) -> None:
    outputs = []
    for spec in specs_of(digits):
        viewed = digits.subnet(spec)(X)
        torch.testing.assert_close(viewed, digits.extract(spec)(X), rtol=0, atol=0)
        torch.testing.assert_close(viewed, digits(X, subnet=spec), rtol=0, atol=0)
        digits.actuate(spec)
        assert digits.active == spec
        torch.testing.assert_close(viewed, digits(X), rtol=0, atol=0)
        outputs.append(viewed)
    assert all((a - b).abs().max() > 1e-3 for i, a in enumerate(outputs) for b in outputs[:i])


def test_running_another_subnet_leaves_the_active_one(digits: Supernet) -> None:
    digits.actuate(digits.space.smallest())
    digits(X, subnet=digits.space.largest())
    assert digits.active == digits.space.smallest()


def test_the_largest_subnet_is_the_plain_network(digits: Supernet) -> None:
    from subnetact.digits import DigitsNet

    plain = DigitsNet().eval()
    plain.load_state_dict(digits.state_dict())
    torch.testing.assert_close(digits(X), plain(X), rtol=0, atol=0)


def test_view_parameters_share_the_supernets_storage(digits: Supernet) -> None:
    pointers = {p.untyped_storage().data_ptr() for p in digits.state_dict().values()}
    for spec in specs_of(digits):
        view = digits.subnet(spec)
        own = [*view.parameters(), *view.buffers()]
        assert own
        assert all(t.untyped_storage().data_ptr() in pointers for t in own)
        extracted = digits.extract(spec)
        assert all(t.untyped_storage().data_ptr() not in pointers for t in extracted.parameters())
        assert all(p.is_contiguous() and p.requires_grad for p in extracted.parameters())


def test_equal_sizes_share_tensors_and_modules_stay_private(digits: Supernet) -> None:
    space = digits.space
    one = space.spec(depth=[1, 1, 1], expand=[0.5, 0.25, 0.5], width=0.5)
    other = space.spec(depth=[1, 2, 1], expand=[0.5, 0.5, 0.25], width=0.5)
    a, b = digits.subnet(one), digits.subnet(other)
    assert a.stages[0][0].conv1.weight is b.stages[0][0].conv1.weight
    assert a.stages[0][0].conv1 is not b.stages[0][0].conv1
    expected = b(X)
    seen = []
    handle = a.stages[0][0].conv1.register_forward_hook(lambda m, args, out: seen.append(m) or 2 * out)
    torch.testing.assert_close(b(X), expected, rtol=0, atol=0)
    assert not seen
    changed = a(X)
    assert seen == [a.stages[0][0].conv1]
    handle.remove()
    assert not torch.equal(a(X), changed)
    a.stages[0][0].conv1.weight = nn.Parameter(torch.zeros_like(a.stages[0][0].conv1.weight))
    torch.testing.assert_close(b(X), expected, rtol=0, atol=0)


def test_views_follow_the_weights_in_place(digits: Supernet) -> None:
    spec = digits.space.smallest()
    view, before = digits.subnet(spec), digits.subnet(spec)(X)
    with torch.no_grad():
        digits.network.stem.weight.mul_(-1.5)
    after = view(X)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, digits.extract(spec)(X), rtol=0, atol=0)


def test_four_threads_give_the_serial_outputs(digits: Supernet) -> None:
    specs = specs_of(digits, 20)
    serial = {spec: digits.subnet(spec)(X) for spec in specs}
    fresh = copy.deepcopy(digits)
    wrong: list[object] = []
    barrier = threading.Barrier(4)

    def hammer(seed: int) -> None:
        rng = random.Random(seed)
        barrier.wait()
        for _ in range(60):
            spec = rng.choice(specs)
            output = fresh(X, subnet=spec)
            if not torch.equal(output, serial[spec]):
                wrong.append(spec)

    threads = [threading.Thread(target=hammer, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_actuate_from_another_thread_never_mixes_subnets(digits: Supernet) -> None:
    small, large = digits.space.smallest(), digits.space.largest()
    allowed = [digits(X, subnet=small), digits(X, subnet=large)]
    stop = threading.Event()

    def flip() -> None:
        while not stop.is_set():
            digits.actuate(small)
            digits.actuate(large)

    flipper = threading.Thread(target=flip)
    flipper.start()
    try:
        outputs = [digits(X) for _ in range(150)]
    finally:
        stop.set()
        flipper.join()
    assert all(any(torch.equal(o, a) for a in allowed) for o in outputs)


def test_a_view_refuses_what_would_reach_other_subnets(digits: Supernet) -> None:
    view = digits.subnet(digits.space.smallest())
    before = {k: v.clone() for k, v in digits.state_dict().items()}
    for harmful in (
        view.half,
        lambda: view.to("meta"),
        view.train,
        lambda: view.load_state_dict(view.state_dict()),
        lambda: view.stages[0].double(),
    ):
        with pytest.raises(ViewError):
            harmful()
    assert all(torch.equal(v, digits.state_dict()[k]) for k, v in before.items())
    assert view.float() is view
    assert view.eval() is view


def test_a_view_has_nothing_to_train_not_even_what_is_not_elastic() -> None:
    space = subnetact.SubnetSpace(
        "own", [subnetact.Axis.uniform("width", ["all"], [2, 4])], lambda v: {"width": v["width"][0]}
    )
    network = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4)).eval()
    supernet = subnetact.insert_(network, space, {"1": subnetact.WeightSlice.on(out="width")})
    small, large = supernet.subnet(space.smallest()), supernet.subnet(space.largest())
    x = torch.randn(2, 3)
    assert not any(p.requires_grad for p in small.parameters())
    assert not small(x).requires_grad
    assert small[0].weight is large[0].weight
    with torch.no_grad():
        supernet.network[0].weight.mul_(2)
    assert torch.equal(small[0].weight, supernet.network[0].weight)
    supernet.network[0].weight = nn.Parameter(torch.zeros(5, 3))
    supernet.refresh()
    assert not supernet.subnet(space.smallest())[0].weight.any()
    assert all(p.requires_grad for p in supernet.parameters())
    supernet.train()
    supernet(x, subnet=space.smallest()).sum().backward()
    assert supernet.network[0].weight.grad is not None


class Marked(nn.Parameter):
    """A subclass of Parameter."""


def test_parameters_of_another_class_and_with_attributes_are_kept() -> None:
    space = subnetact.SubnetSpace(
        "own", [subnetact.Axis.uniform("width", ["all"], [2, 4])], lambda v: {"width": v["width"][0]}
    )
    network = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4)).eval()
    network[0].weight = Marked(network[0].weight.data)
    network[0].bias.scale = 2.0
    supernet = subnetact.insert_(network, space, {"1": subnetact.WeightSlice.on(out="width")})
    view = supernet.subnet(space.smallest())
    assert view[0].weight is network[0].weight
    assert view[0].bias.scale == 2.0
    supernet.requires_grad_(False)
    supernet.refresh()
    frozen = supernet.subnet(space.smallest())
    supernet.requires_grad_(True)
    assert not frozen[0].bias.requires_grad


def test_changing_a_views_modules_stays_in_the_view(digits: Supernet) -> None:
    space = digits.space
    a, b = (
        digits.subnet(space.spec(depth=1, expand=0.5, width=0.5)),
        digits.subnet(space.spec(depth=2, expand=0.5, width=0.5)),
    )
    expected, names = b(X), list(digits.state_dict())
    del a.stem.weight
    a.stages.register_buffer("extra", torch.zeros(1))
    a.bn.extra = nn.Linear(1, 1)
    a.classifier.bias = None
    torch.nn.utils.parametrize.register_parametrization(a.classifier, "weight", nn.Identity(), unsafe=True)
    assert torch.equal(b(X), expected)
    assert list(digits.state_dict()) == names
    with pytest.raises(ViewError):
        b.requires_grad_(True)


def test_hooks_of_every_kind_are_private_and_survive_a_copy(digits: Supernet) -> None:
    a, b = digits.subnet(digits.space.smallest()), digits.subnet(digits.space.largest())
    fired: list[str] = []
    a.stem.register_state_dict_post_hook(lambda *args: fired.append("state_dict"))
    b.state_dict()
    assert not fired
    copied = copy.deepcopy(b)
    copied.stem.register_forward_hook(lambda *args: fired.append("forward"))
    copied(X)
    assert fired == ["forward"]
    b(X)
    assert fired == ["forward"]


def test_concurrent_callers_get_one_view(digits: Supernet) -> None:
    for spec in specs_of(digits, 8):
        barrier, found = threading.Barrier(4), []

        def get(
            spec: subnetact.SubnetSpec = spec, barrier: threading.Barrier = barrier, found: list = found
        ) -> None:
            barrier.wait()
            found.append(digits.subnet(spec))

        threads = [threading.Thread(target=get) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(view is digits.subnet(spec) for view in found)


def test_a_view_built_while_weights_are_exchanged_is_not_kept(
    digits: Supernet, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = digits.space.smallest()
    other = {k: 1.5 * v for k, v in digits.state_dict().items()}
    before, norm, exchanged = digits.extract(spec)(X), digits.norm_operators()["bn"], []
    bind = norm.bind_with

    def late_bind(*args: object) -> nn.Module:  # The last BatchNorm: all layers before it are bound.
        if not exchanged:
            exchanged.append(1)
            digits.load_state_dict(other, assign=True)
        return bind(*args)

    monkeypatch.setattr(norm, "bind_with", late_bind)
    output = digits(X, subnet=spec)
    assert exchanged
    assert torch.equal(output, digits.extract(spec)(X))
    assert not torch.equal(output, before)


def test_weights_exchanged_behind_its_back_need_a_refresh(digits: Supernet) -> None:
    spec = digits.space.smallest()
    digits(X, subnet=spec)
    for parameter in digits.parameters():
        parameter.data = torch.zeros_like(parameter)
    assert digits.extract(spec)(X).abs().max() == 0
    digits.refresh()
    assert digits(X, subnet=spec).abs().max() == 0


def test_a_supernet_inside_a_module_saves_and_loads(digits: Supernet) -> None:
    around = nn.Sequential(digits, nn.Linear(10, 2))
    state = {k: v.clone() for k, v in around.state_dict().items()}
    assert "0.stem.weight" in state
    expected = around(X)
    with torch.no_grad():
        digits.network.stem.weight.zero_()
    assert not torch.equal(around(X), expected)
    around.load_state_dict(state)
    assert torch.equal(around(X), expected)


def test_wrong_weights_load_nothing(digits: Supernet) -> None:
    before = digits.fingerprint()
    state = {k: torch.zeros_like(v) for k, v in digits.state_dict().items()}
    state["bn.weight"] = torch.zeros(3)
    state["bnn.bias"] = state.pop("bn.bias")
    with pytest.raises(CheckpointError, match=r"bn\.bias is missing; bnn\.bias is extra; bn\.weight \(3,\)"):
        digits.load_state_dict(state)
    assert digits.fingerprint() == before


def test_foreign_and_malformed_specs_change_nothing(digits: Supernet) -> None:
    other = subnetact.SubnetSpace("other", [subnetact.Axis.uniform("a", ["x"], [1])], lambda v: {"x": 1})
    active = digits.active
    for call in (digits.subnet, digits.actuate, digits.extract, lambda s: digits(X, subnet=s)):
        with pytest.raises(ForeignSpec):
            call(other.largest())
        with pytest.raises(SpecError):
            call("largest")
        with pytest.raises(SpecError):
            call({"depth": 1})
    assert digits.active == active


def test_gradients_of_training_reach_the_full_weights(digits: Supernet) -> None:
    spec = digits.space.spec(depth=1, expand=0.25, width=0.25)
    digits.train()
    digits(X, subnet=spec).square().sum().backward()
    stem = digits.network.stem.weight.grad
    assert stem is not None
    assert stem[:16].abs().sum() > 0
    assert stem[16:].abs().sum() == 0
    assert digits.network.get_submodule("stages.0.1.conv1").weight.grad is None
    plain = digits.extract(spec).train()
    plain(X).square().sum().backward()
    torch.testing.assert_close(stem[:12], plain.stem.weight.grad[:12], rtol=1e-4, atol=1e-5)


def test_training_the_largest_subnet_updates_the_shared_statistics(digits: Supernet) -> None:
    spec, largest = digits.space.smallest(), digits.space.largest()
    norm = digits.norm_operators()["bn"]
    before = norm.running_mean.clone()
    digits.train()
    digits(X, subnet=spec)
    assert torch.equal(norm.running_mean, before)
    digits(X, subnet=largest)
    assert not torch.eq(norm.running_mean, before).any()
    digits.eval()
    torch.testing.assert_close(digits(X, subnet=spec), digits.extract(spec)(X), rtol=0, atol=0)


def test_moving_the_supernet_takes_its_views_and_statistics_along(digits: Supernet) -> None:
    spec = digits.space.smallest()
    subnetact.calibrate(digits, [spec], [X], progress=False)
    expected = digits(X, subnet=spec)
    digits.double()
    output = digits(X.double(), subnet=spec)
    assert output.dtype == torch.float64
    torch.testing.assert_close(output.float(), expected, rtol=1e-4, atol=1e-4)


def test_loading_weights_reaches_new_views(digits: Supernet) -> None:
    spec = digits.space.smallest()
    view = digits.subnet(spec)
    zeros = {k: torch.zeros_like(v) for k, v in digits.state_dict().items()}
    digits.load_state_dict(zeros)
    assert view(X).abs().max() > 0  # A view that is held keeps the weights that it was made of.
    assert digits(X, subnet=spec).abs().max() == 0
    held = digits.subnet(spec)
    with torch.no_grad():
        digits.network.classifier.bias.fill_(2)
    assert held(X).max() == 2
    digits.network.load_state_dict(zeros)  # in place
    assert held(X).abs().max() == 0
    replaced = {k: v.clone() for k, v in copy.deepcopy(digits).state_dict().items()}
    replaced["classifier.bias"] = torch.ones(10)
    digits.load_state_dict(replaced, assign=True)
    torch.testing.assert_close(digits(X, subnet=spec), torch.ones(4, 10), rtol=0, atol=0)


def test_a_copied_supernet_is_independent(digits: Supernet) -> None:
    spec = digits.space.smallest()
    expected = digits(X, subnet=spec)
    other = copy.deepcopy(digits)
    with torch.no_grad():
        other.network.stem.weight.zero_()
    torch.testing.assert_close(digits(X, subnet=spec), expected, rtol=0, atol=0)
    assert not torch.equal(other(X, subnet=spec), expected)
    assert other.fingerprint() != digits.fingerprint()


def test_state_dict_has_the_plain_networks_names(digits: Supernet) -> None:
    from subnetact.digits import DigitsNet

    assert list(digits.state_dict()) == list(DigitsNet().state_dict())


def test_one_warning_for_shared_statistics(digits: Supernet) -> None:
    with pytest.warns(UncalibratedSubnetWarning, match=r"subnetact\.calibrate"):
        digits.subnet(digits.space.smallest())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        digits.subnet(digits.space.largest())


def test_the_warning_points_to_the_line_of_the_user() -> None:
    x = torch.zeros(1, 1, 16, 16)
    for act in (
        lambda supernet, spec: supernet(x, subnet=spec),
        lambda supernet, spec: supernet.subnet(spec),
        lambda supernet, spec: subnetact.Engine(supernet, [spec], example=x[:1], allow_uncalibrated=True),
    ):
        supernet = new_digits_supernet().eval()
        with pytest.warns(UncalibratedSubnetWarning) as warned:
            act(supernet, supernet.space.smallest())
        assert [warning.filename for warning in warned] == [__file__]


def test_cached_views_are_bounded(digits: Supernet) -> None:
    digits.cached_views = 3
    specs = specs_of(digits, 10)
    views = [weakref.ref(digits.subnet(spec)) for spec in specs]
    gc.collect()
    assert [view() is not None for view in views] == [False] * (len(specs) - 3) + [True] * 3
    assert [digits.subnet(spec) for spec in specs[-3:]] == [view() for view in views[-3:]]
    assert digits.subnet(specs[0]) is digits.subnet(specs[0])


def test_views_compile_export_and_script(digits: Supernet) -> None:
    view = digits.subnet(digits.space.smallest())
    expected = view(X)
    torch.testing.assert_close(torch.export.export(view, (X,)).module()(X), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.compile(view, backend="eager")(X), expected, rtol=0, atol=0)
    torch.testing.assert_close(torch.jit.script(view)(X), expected, rtol=0, atol=0)


def test_a_mixin_changes_one_module() -> None:
    class Doubled:
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)  # type: ignore[misc]

    one, other, x = nn.Linear(3, 2), nn.Linear(3, 2), torch.randn(4, 3)
    expected = one(x), other(x)
    assert mix_in_(one, Doubled) is one
    assert type(one).__name__ == "Linear"
    assert torch.equal(one(x), 2 * expected[0])
    assert torch.equal(other(x), expected[1])


def test_removed_operators_leave_ordinary_registries_also_in_replaced_modules() -> None:
    supernet = new_digits_supernet()
    own = list(supernet.network.modules())
    supernet(X)
    first, supernet.network.classifier = supernet.network.classifier, nn.Linear(192, 10)
    supernet(X)
    own += [m for m in supernet.network.modules() if m not in own]
    network = supernet.remove()
    for module in (*own, *network.modules(), first, first.template):
        for name in ("_parameters", "_buffers", "_modules"):
            assert type(module.__dict__[name]) is dict, (type(module).__name__, name)
