"""All doors to the weights in random order: every answer is that of one checkpoint.

What outlives a change of the weights (views, copies, fused programs, statistics, calibrations, bundles,
caches, generators) is driven through random interleavings of the doors that change them. The schedule is a
fake one: batches that are given, files that are written and subnets that are chosen are where other doors
open. Every answer is compared with that of a plain network, written down here, loaded with one checkpoint.
The last tests put one fault after the other into the library, and the same interleavings find it.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from generation_tables import step_table
from held_steps import steer
from small_decoders import small_decoder
from torch import Tensor, nn

import subnetact
from subnetact.calibration import calibrate as calibration
from subnetact.elastic import folder as bundles
from subnetact.engine import engine as engines
from subnetact.engine import fusion_plan
from subnetact.errors import CacheMismatch, StaleWeights
from subnetact.files.documents import FolderFormat
from subnetact.files.tensors import read_tensors
from subnetact.insertion import key_value_cache
from subnetact.insertion.key_value_cache import CacheWriter, cache_relation, switch
from subnetact.operators import ElasticKernel, KernelConv2d, tensor_version
from subnetact.operators.packed_copy import PackedCopy
from subnetact.operators.tensor_version import changes_of
from subnetact.spec import SubnetSpec
from subnetact.supernet import replacements
from subnetact.supernet.generation import Moment
from subnetact.supernet.norm_table import NormRow, NormTable
from subnetact.supernet.supernet import Supernet

pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")
State = dict[str, Tensor]
Rows = dict[SubnetSpec, dict[str, tuple[Tensor, Tensor]]]
Fault = Callable[[pytest.MonkeyPatch], None]
SEEDS = range(6)
STEPS = 14

# -- images: BatchNorm statistics, packed copies, fused programs, bundles --------------------------------

WIDTHS, KERNELS, LAYERS = (5, 8), (1, 3), 2
X = torch.randn(2, 8, 5, 5, generator=torch.Generator().manual_seed(1))
BATCHES = [torch.randn(4, 8, 5, 5, generator=torch.Generator().manual_seed(i)) for i in (2, 3)]


class Convolutions(nn.Module):
    """Elastic and fixed layers, kernels that are computed with matrices, BatchNorms and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.ModuleList(KernelConv2d(8, list(KERNELS), matrices=True) for _ in range(LAYERS))
        self.narrow = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(LAYERS))
        self.wide = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(LAYERS))
        self.norm = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(LAYERS))
        self.register_buffer("shift", torch.zeros(8, 1, 1))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for i in range(LAYERS):
            y = self.wide[i](self.narrow[i](self.kernel[i](x)).relu())
            x = self.norm[i](x + y) + self.shift
        return self.head(x.mean((2, 3)))


def plain(state: State, rows: Rows, spec: SubnetSpec, x: Tensor, found: list[Any] | None = None) -> Tensor:
    """Compute a subnet from a checkpoint; with `found`, normalise with the batch and note its statistics."""
    width, kernel = (int(spec[axis][0]) for axis in ("w", "k"))  # type: ignore[arg-type]
    for i in range(LAYERS):
        weight = state[f"kernel.{i}.weight"]
        if kernel == 1:
            weight = weight[:, :, 1:2, 1:2] * state[f"kernel.{i}.3to1_matrix"]
        y = F.conv2d(x, weight, padding=kernel // 2, groups=8)
        y = F.conv2d(y, state[f"narrow.{i}.weight"][:width], state[f"narrow.{i}.bias"][:width]).relu()
        x = x + F.conv2d(y, state[f"wide.{i}.weight"][:, :width], state[f"wide.{i}.bias"])
        if found is not None:
            mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
            found.append((mean, var))
        elif spec in rows:
            mean, var = rows[spec][f"norm.{i}"]
        else:
            mean, var = state[f"norm.{i}.running_mean"], state[f"norm.{i}.running_var"]
        weight, bias = state[f"norm.{i}.weight"], state[f"norm.{i}.bias"]
        x = F.batch_norm(x, mean, var, weight, bias) + state["shift"]
    return F.linear(x.mean((2, 3)), state["head.weight"], state["head.bias"])


def calibrated(state: State, spec: SubnetSpec) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the statistics of a subnet on `BATCHES`."""
    taken: list[list[Any]] = [[], []]
    for batch, found in zip(BATCHES, taken, strict=True):
        plain(state, {}, spec, batch, found)
    pairs = zip(*taken, strict=True)
    return {
        f"norm.{i}": tuple((a + b) / 2 for a, b in zip(*pair, strict=True)) for i, pair in enumerate(pairs)
    }  # type: ignore[misc]


class Images:
    """A supernet of convolutions, what uses its weights, and the checkpoint that it should have."""

    def __init__(self, seed: int, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.rng, self.folder, self.patch, self.log = random.Random(seed), folder, patch, [f"seed {seed}"]
        axes = [subnetact.Axis.uniform(n, ["all"], c) for n, c in (("w", WIDTHS), ("k", KERNELS))]
        space = subnetact.SubnetSpace("deep", axes, lambda v: {"w": v["w"][0], "k": v["k"][0], "c": 8})
        elastic: dict[str, Any] = {}
        for i in range(LAYERS):
            elastic[f"kernel.{i}"] = ElasticKernel.on(channels="c", kernel="k")
            elastic[f"narrow.{i}"] = subnetact.WeightSlice.on(out="w")
            elastic[f"wide.{i}"] = subnetact.WeightSlice.on(in_="w")
        network = Convolutions()
        network.load_state_dict(self.new_state(network.state_dict()))
        self.supernet = subnetact.insert_(network, space, elastic).eval()
        self.state, self.rows, self.original = self.taken(), Rows(), True
        self.specs = [space.smallest(), space.largest()]
        options: Any = {"example": X[:1], "allow_uncalibrated": True, "memory_budget_mb": 64}
        self.engine = subnetact.Engine(self.supernet, self.specs, check=False, **options)
        self.bundle: tuple[Path, State, Rows] | None = None
        self.read: list[tuple[Tensor, Tensor]] = []
        self.held: tuple[nn.Module, SubnetSpec, State, Rows] | None = None
        self.saves = self.changes = 0

    def new_state(self, like: State) -> State:
        draw = torch.Generator().manual_seed(self.rng.randrange(10**6))
        state = {}
        for name, tensor in like.items():
            values = torch.rand(tensor.shape, generator=draw)
            low = 0.5 if "var" in name or name.startswith("norm") else -0.5
            state[name] = values + low if tensor.is_floating_point() else tensor.clone()
        return state

    def new_rows(self) -> Rows:
        def pair() -> tuple[Tensor, Tensor]:
            draw = torch.Generator().manual_seed(self.rng.randrange(10**6))
            return torch.rand(8, generator=draw), torch.rand(8, generator=draw) + 0.5

        return {spec: {f"norm.{i}": pair() for i in range(LAYERS)} for spec in self.specs}

    def taken(self) -> State:
        return {name: tensor.clone() for name, tensor in self.supernet.network.state_dict().items()}

    # doors that change weights

    def load(self) -> None:
        """Load other weights, with or without statistics of their own."""
        norms = self.rng.random() < 0.7
        self.state = self.new_state(self.state)
        table = self.supernet.norms
        if norms:
            self.rows = self.new_rows()
            table = NormTable(self.supernet.space.id)
            table.update({spec: NormRow.of(rows) for spec, rows in self.rows.items()})
        self.supernet.load_state_dict(self.state, norms=table)

    def in_place(self) -> None:
        """Change every weight in place, as a step of training does; fused ones count no change themselves."""
        for parameter in self.supernet.parameters():
            parameter.grad = -parameter.detach()
        optimizer = torch.optim.SGD(self.supernet.parameters(), lr=0.4, fused=self.rng.random() < 0.5)
        optimizer.step()
        optimizer.zero_grad()
        self.state = self.taken()

    def unseen(self) -> None:
        """Change weights in a way that nothing shows, and say so."""
        for parameter in self.supernet.parameters():
            parameter.data.mul_(0.7)
        self.supernet.refresh()
        self.state = self.taken()

    def load_mapped(self) -> None:
        """Load a bundle that was saved before, whose weights stay in its file."""
        if self.bundle is None:
            self.load()
            return
        path, self.state, self.rows = self.bundle
        subnetact.Engine.load(path, supernet=self.supernet, mapped=True, check=False)

    DOORS = (load, in_place, unseen, load_mapped)
    EXCHANGES = (load, load_mapped)

    def doors(self) -> None:
        """Open some doors, or none, where another thread could."""
        for door in self.rng.sample(self.DOORS, self.rng.choice((0, 0, 1, 1, 2))):
            self.log.append(f"... {door.__name__}")
            self.open(door)

    def open(self, door: Callable[[Images], None]) -> None:
        """Change the weights; a view that is held then follows, or keeps the former weights."""
        follows = self.held is not None and self.held[2] is self.state
        if self.held is not None and follows:
            view, spec, state, rows = self.held
            self.held = (view, spec, dict(state), rows) if door in Images.EXCHANGES else None
        self.changes, self.original = self.changes + 1, False
        with torch.inference_mode(False):  # Modes are those of a thread.
            door(self)

    # what uses weights

    def train(self) -> None:
        """Run a batch in training mode, which moves the statistics of the largest subnet and no weight."""
        self.supernet.train()
        self.supernet(X, subnet=self.specs[1])
        self.supernet.eval()
        if any(not torch.equal(self.state[n], t) for n, t in self.taken().items() if "running" in n):
            self.held = None
        self.state, self.original = self.taken(), False
        if self.specs[1] in self.rows:
            names = [f"norm.{i}" for i in range(LAYERS)]
            pairs = {n: (self.state[f"{n}.running_mean"], self.state[f"{n}.running_var"]) for n in names}
            self.rows = {**self.rows, self.specs[1]: pairs}

    def calibrate(self) -> None:
        """Calibrate while other doors open between the batches."""
        began, was = self.changes, self.original
        train = self.rng.random() < 0.3

        def batches() -> Iterator[Tensor]:
            yield BATCHES[0]
            self.doors()
            if train and not was:
                self.log.append("... train")
                self.train()
            yield BATCHES[1]
            self.doors()

        try:
            subnetact.calibrate(self.supernet, self.specs, batches(), progress=False, check=False)
        except StaleWeights:
            assert self.changes > began, "nothing had changed"
            return
        found = {spec: calibrated(self.state, spec) for spec in self.specs}
        if was and self.original:
            names = [f"norm.{i}" for i in range(LAYERS)]
            found[self.specs[1]] = {
                n: (self.state[f"{n}.running_mean"], self.state[f"{n}.running_var"]) for n in names
            }
        self.rows = found

    def save(self) -> None:
        """Save a bundle while other doors open; it holds one of the checkpoints that there were."""
        self.saves += 1
        path, seen = self.folder / f"bundle{self.saves}", [(self.state, self.rows)]
        open_, tensors = FolderFormat.writing, bundles.write_tensors

        def opening(function: Any) -> Any:
            def call(*args: Any) -> Any:
                self.doors()
                seen.append((self.state, self.rows))
                return function(*args)

            return call

        with self.patch.context() as patch:
            patch.setattr(FolderFormat, "writing", opening(open_))
            patch.setattr(bundles, "write_tensors", opening(tensors))
            self.engine.save(path)
        state, norms = read_tensors(path / "model.safetensors"), NormTable.load(path / "norms.safetensors")
        if (path / "shared_norms.safetensors").exists():
            state |= read_tensors(path / "shared_norms.safetensors")
        rows = {spec: row.pairs() for spec, row in norms.rows.items()}
        for spec in self.specs:
            here = plain(state, rows, spec, X)
            assert any(near(here, plain(*one, spec, X)) for one in seen), "the bundle holds no one checkpoint"
        match = next(
            (
                one
                for one in seen
                if all(near(plain(state, rows, s, X), plain(*one, s, X)) for s in self.specs)
            ),
            None,
        )
        assert match is not None, "the bundle holds no one checkpoint"
        self.bundle = path, *match

    def pin(self) -> None:
        """Make fused programs while other doors open."""
        make = fusion_plan.FusedProgram

        def opening(*args: Any) -> Any:
            self.doors()
            return make(*args)

        with self.patch.context() as patch:
            patch.setattr(fusion_plan, "FusedProgram", opening)
            for i in range(len(self.specs)):
                self.engine.pin(i)

    def hold(self) -> None:
        """Take a view and a packed copy, as a forward pass of another thread would that has begun."""
        spec = self.rng.choice(self.specs)
        view: Any = self.supernet.subnet(spec)
        self.held = view, spec, self.state, self.rows
        kernel = self.supernet.subnet(self.specs[0]).get_submodule("kernel.0").weight
        self.read.append((kernel, kernel.clone()))

    def step(self) -> None:
        """Do one thing, and compare every answer."""
        do = self.rng.choice(
            (
                *self.DOORS,
                Images.train,
                Images.calibrate,
                Images.calibrate,
                Images.save,
                Images.pin,
                Images.hold,
            )
        )
        self.log.append(do.__name__)
        if do in self.DOORS:
            self.open(do)
        else:
            do(self)
        self.compare()

    def compare(self) -> None:
        with torch.no_grad():
            for i, spec in enumerate(self.specs):
                right = plain(self.state, self.rows, spec, X)
                for name, got in (
                    ("call", self.supernet(X, subnet=spec)),
                    ("view", self.supernet.subnet(spec)(X)),
                    ("engine", self.engine(X, i)),
                    ("extract", self.supernet.extract(spec)(X)),
                ):
                    assert near(got, right), f"{name} of {spec}"
            if self.held is not None:
                view, spec, state, rows = self.held
                own = plain(state, rows, spec, X)
                assert near(view(X), own), f"a view that was taken before, of {spec}"
        for tensor, before in self.read:
            assert torch.equal(tensor, before), "a packed copy was overwritten while it was read"


def near(got: Tensor, right: Tensor) -> bool:
    """Compare outputs of kernels that round differently; other checkpoints are off by far more."""
    return torch.allclose(got, right, rtol=2e-3, atol=1e-3)


# -- texts: key-value caches and the generator --------------------------------------------------------------

VOCABULARY = 50


class Texts:
    """Two supernets of one architecture, caches of both, and a generator that is stepped by hand."""

    def __init__(self, seed: int) -> None:
        from subnetact.generation import StepPolicy
        from subnetact.generation.step_loop import ElasticDecoder, StepLoop
        from subnetact.generation.step_scheduler import StepScheduler

        self.rng, self.log = random.Random(seed), [f"seed {seed}"]
        self.plain, self.supernets = copy.deepcopy(_DECODER[0]), copy.deepcopy(_DECODER[1])
        self.states = [{n: t.clone() for n, t in one.state_dict().items()} for one in self.supernets]
        space = self.supernets[0].space
        widest = [24] * 4
        self.specs = [space.largest(), space.spec(ffn=[*widest[:3], 8]), space.spec(ffn=[8, *widest[1:]])]
        self.caches: list[dict[str, Any]] = []
        self.loads: Callable[[], None] | None = None
        self.decoder = ElasticDecoder(self.supernets[0], self.specs[:2])
        policy = StepPolicy(step_table(["wide", "narrow"], (50.0, 40.0)), 50.0)
        steer(policy, self._choose)
        self.scheduler = StepScheduler(policy, places=3, step_tokens=16)
        self.loop = StepLoop(
            self.decoder,
            pushed_out=self.scheduler.push_out,
            sequences=3,
            cache_tokens=512,
            step_tokens=16,
        )

    def right(self, state: State, spec: SubnetSpec, tokens: Tensor) -> Tensor:
        """Return the logits behind the tokens, of a plain network with zeros in place of what is dropped."""
        self.plain.load_state_dict(state)
        for i, width in enumerate(spec["ffn"]):
            mlp: Any = self.plain.model.layers[i].mlp
            for layer in (mlp.gate_proj, mlp.up_proj):
                layer.weight.data[width:] = 0.0
        with torch.no_grad():
            logits: Tensor = self.plain(tokens, use_cache=False).logits[:, -1]
        return logits

    # doors that change weights

    def load(self, which: int | None = None) -> None:
        """Load other weights."""
        which = self.rng.randrange(2) if which is None else which
        draw = torch.Generator().manual_seed(self.rng.randrange(10**6))
        self.states[which] = {
            n: 0.3 * torch.randn(t.shape, generator=draw) if t.dim() > 1 else t.clone()
            for n, t in self.states[which].items()
        }
        self.supernets[which].load_state_dict(self.states[which])

    def in_place(self) -> None:
        """Change weights in place."""
        self._scale(lambda parameter: parameter)

    def unseen(self) -> None:
        """Change weights in a way that nothing shows, and say so."""
        self._scale(lambda parameter: parameter.data).refresh()

    def _scale(self, way: Callable[[Any], Tensor]) -> Supernet:
        which = self.rng.randrange(2)
        with torch.no_grad():
            for parameter in self.supernets[which].parameters():
                if parameter.dim() > 1:
                    way(parameter).mul_(-1.1 if parameter.shape[0] != VOCABULARY else 1.0)
        self.states[which] = {n: t.clone() for n, t in self.supernets[which].state_dict().items()}
        return self.supernets[which]

    # what uses weights

    def fill(self) -> None:
        """Let a subnet fill a new cache."""
        from transformers import DynamicCache

        which, spec = self.rng.randrange(2), self.rng.choice(self.specs)
        cache = DynamicCache(config=self.supernets[which].network.config)
        self._continue(
            {"cache": cache, "tokens": torch.zeros(2, 0, dtype=torch.long)}, which, spec, "view", 5
        )

    def go_on(self) -> None:
        """Let a subnet continue on a cache, as a view, by `switch`, or from the beginning."""
        if self.caches:
            one = self.rng.choice(self.caches)
            which = one["which"] if self.rng.random() < 0.7 else 1 - one["which"]
            spec = one["spec"] if self.rng.random() < 0.5 else self.rng.choice(self.specs)
            self._continue(one, which, spec, self.rng.choice(("view", "switch", "reset")), 1)

    def empty(self) -> None:
        """Empty a cache, which any subnet may fill then."""
        if self.caches:
            one = self.rng.choice(self.caches)
            if self.rng.random() < 0.5:
                one["cache"].reset()
            else:
                one["cache"].crop(-one["tokens"].shape[1])
            one["tokens"] = one["tokens"][:, :0]
            self._continue(one, self.rng.randrange(2), self.rng.choice(self.specs), "view", 4)

    def _continue(self, one: dict[str, Any], which: int, spec: SubnetSpec, way: str, count: int) -> None:
        draw = torch.Generator().manual_seed(self.rng.randrange(10**6))
        new = torch.randint(2, VOCABULARY, (2, count), generator=draw)
        supernet, cache, before = self.supernets[which], one["cache"], one["tokens"]
        self.log.append(f"... {way} of {which}: {spec.key} on {before.shape[1]} positions")
        own = before.shape[1] and one["which"] == which and one["state"] is self.states[which]
        try:
            with torch.no_grad():
                given, view = new, supernet.subnet(spec)
                if way == "switch":
                    view = switch(supernet, cache, spec)
                elif way == "reset":
                    cache.reset()
                    given = torch.cat([before, new], 1)
                logits = view(given, past_key_values=cache, use_cache=True).logits[:, -1]
        except CacheMismatch:
            exact = own and cache_relation(supernet, one["spec"], spec) == "exact"
            assert not exact, "a cache that fits was refused"
            assert way != "reset", "a cache that is computed again was refused"
            assert before.shape[1], "an empty cache was refused"
            return
        tokens = torch.cat([before, new], 1)
        assert near(logits, self.right(self.states[which], spec, tokens)), "the cache is of other weights"
        first = one["spec"] if own and way != "reset" else spec
        one |= {"tokens": tokens, "which": which, "spec": first, "state": self.states[which]}
        if not any(one is known for known in self.caches):
            self.caches.append(one)

    # the generator

    def submit(self) -> None:
        """Give the generator a sequence."""
        from subnetact.generation import TokenDeadlines
        from subnetact.generation.step_scheduler import StepRequest, TokenAsk

        prompt = [self.rng.randrange(2, VOCABULARY) for _ in range(self.rng.choice((3, 9, 20)))]
        self.scheduler.submit(StepRequest(TokenAsk(prompt, 12, TokenDeadlines(1e9, 1e9))), 0.0)

    def generate(self) -> None:
        """Compute steps; another thread may load weights after a step has begun."""
        for _ in range(self.rng.choice((1, 2, 4))):
            self.now = self.states[0]
            self.loads = (lambda: self.load(0)) if self.rng.random() < 0.3 else None
            self.loop.refresh()
            self.loop.reserve(self.scheduler.candidates())
            if (step := self.scheduler.begin(0.0)) is None:
                return
            for request in self.scheduler.step_done(self.loop.compute(step), 0.0):
                self._check(request)

    def _choose(self) -> int:
        """Choose a random subnet, and let another thread load weights."""
        if self.loads is not None:
            self.log.append("... load")
            self.loads()
        return self.rng.randrange(2)

    def _check(self, request: Any) -> None:
        *before, token = request.tokens
        prefix = torch.tensor([[*request.ask.prompt, *before]])
        logits = self.right(self.now, self.specs[request.subnets[-1]], prefix)[0]
        off = float(logits.max() - logits[token])
        assert off < 1e-2, f"token {len(before)} of request {request.number} is of other weights"

    def step(self) -> None:
        """Do one thing."""
        kinds = (Texts.load, Texts.in_place, Texts.unseen, Texts.fill, Texts.go_on, Texts.go_on)
        do = self.rng.choice((*kinds, Texts.empty, Texts.submit, Texts.generate, Texts.generate))
        self.log.append(do.__name__)
        do(self)


_DECODER: list[Any] = []


@pytest.fixture(scope="module", autouse=True)
def decoder() -> None:
    """Make the decoders once; every interleaving takes copies."""
    if not _DECODER:
        pytest.importorskip("transformers")
        sizes: Any = {"num_hidden_layers": 4, "vocab_size": VOCABULARY}
        made = [
            subnetact.insert_(
                small_decoder("Qwen3Config", **sizes),
                example={"input_ids": torch.arange(2, 10).view(1, 8)},
                axes=("ffn",),
                choices={"ffn": (8, 24)},
                each_block=True,
            )
            for _ in range(2)
        ]
        _DECODER[:] = small_decoder("Qwen3Config", **sizes), made


# -- the interleavings --------------------------------------------------------------------------------------


def run(machine: Images | Texts, steps: int = STEPS) -> None:
    """Take random steps; a failure says which."""
    try:
        for _ in range(steps):
            machine.step()
    except AssertionError as error:
        raise AssertionError(f"{error}\n{chr(10).join(machine.log)}") from error


@pytest.mark.parametrize("seed", SEEDS)
def test_images(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(Images(seed, tmp_path, monkeypatch))


@pytest.mark.parametrize("seed", SEEDS)
def test_texts(seed: int) -> None:
    run(Texts(seed), 3 * STEPS)


# -- faults that the interleavings find -----------------------------------------------------------------


def statistics_of_another_moment(patch: pytest.MonkeyPatch) -> None:
    """A bundle holds the statistics of the moment when saving began, and the weights of a later one."""
    save, copied = engines.save_bundle, NormTable.to_like

    def old(supernet: Supernet, *rest: Any) -> None:
        norms = supernet.norms

        def former(table: NormTable, tensor: Tensor | None) -> NormTable:
            return norms if tensor is None else copied(table, tensor)

        with patch.context() as inner:
            inner.setattr(NormTable, "to_like", former)
            save(supernet, *rest)

    patch.setattr(engines, "save_bundle", old)


def calibrations_are_kept(patch: pytest.MonkeyPatch) -> None:
    """A calibration of former weights overwrites the statistics of the present ones."""
    patch.setattr(calibration, "_require_same_weights", lambda *_: None)


def sums_of_counters(patch: pytest.MonkeyPatch) -> None:
    """The statistics that a network came with are kept if the counters of its weights have not moved."""

    def unchanged(self: Any) -> bool:
        return bool(self._original and self.generation.moment().changes == self._original.changes)

    patch.setattr(Supernet, "_unchanged_since_then", unchanged)


def mapped_without_refresh(patch: pytest.MonkeyPatch) -> None:
    """Mapped weights are exchanged beneath views and engines, which keep the former ones; nobody looks."""
    patch.setattr(replacements, "_place", lambda _: None)
    fill = bundles._fill

    def old(supernet: Supernet, *args: Any) -> None:
        with patch.context() as inner:
            inner.setattr(Supernet, "refresh", lambda _: None)
            fill(supernet, *args)

    patch.setattr(bundles, "_fill", old)


def overwritten_copies(patch: pytest.MonkeyPatch) -> None:
    """A packed copy is computed again in the memory that other threads are reading."""

    def refresh(self: Any) -> None:
        if changes_of(self.sources) != self._changes:
            with torch.no_grad():
                for name, tensor in self._made().items():
                    self.tensors[name].copy_(tensor)
            self._changes = changes_of(self.sources)

    patch.setattr(PackedCopy, "refresh", refresh)


def copies_that_do_not_follow(patch: pytest.MonkeyPatch) -> None:
    """Packed copies stay as they are after a change in place."""
    patch.setattr(PackedCopy, "refresh", lambda _: None)


def programs_that_do_not_follow(patch: pytest.MonkeyPatch) -> None:
    """Fused programs stay as they are after any change."""
    patch.setattr(fusion_plan.PlannedProgram, "is_of", lambda *_: True)


def fused_steps_that_nobody_counts(patch: pytest.MonkeyPatch) -> None:
    """A fused optimizer changes weights, and their counters stay."""
    patch.setattr(tensor_version, "increment_version", lambda _: None)


def the_generator_keeps_its_views(patch: pytest.MonkeyPatch) -> None:
    """A generator takes its views once."""
    from subnetact.generation.step_loop import ElasticDecoder

    patch.setattr(ElasticDecoder, "follow", lambda *_: False)


def the_generator_keeps_its_pages(patch: pytest.MonkeyPatch) -> None:
    """A generator takes its views again, and goes on with keys and values of former weights."""
    from subnetact.generation.step_loop import ElasticDecoder

    real = ElasticDecoder.follow
    patch.setattr(ElasticDecoder, "follow", lambda self, cache: real(self, cache) and False)


def caches_of_anybody(patch: pytest.MonkeyPatch) -> None:
    """A cache does not know whose weights wrote it."""
    _noted(patch, lambda moment: Moment("", "", 0, 0))


def caches_of_other_supernets(patch: pytest.MonkeyPatch) -> None:
    """A cache knows the changes of weights, and not whose they are."""
    _noted(patch, lambda moment: moment._replace(owner="", weights=""))


def caches_of_changed_weights(patch: pytest.MonkeyPatch) -> None:
    """A cache knows what was loaded, and not what was changed in place."""
    _noted(patch, lambda moment: moment._replace(changes=0))


def _noted(patch: pytest.MonkeyPatch, seen: Callable[[Moment], Moment]) -> None:
    class Blind:
        def __init__(self, weights: Any) -> None:
            self.weights = weights

        def moment(self) -> Moment:
            return seen(self.weights.moment())

    def writer(rules: Any, space: str, signature: Any, weights: Any) -> CacheWriter:
        blind: Any = Blind(weights)
        return CacheWriter(rules, space, signature, blind)

    patch.setattr(key_value_cache, "CacheWriter", writer)


IMAGE_FAULTS: dict[Fault, str] = {
    statistics_of_another_moment: "the bundle holds no one checkpoint",
    calibrations_are_kept: "call of",
    sums_of_counters: "call of",
    mapped_without_refresh: "call of|engine of",
    overwritten_copies: "a packed copy was overwritten",
    copies_that_do_not_follow: "call of|engine of",
    programs_that_do_not_follow: "engine of",
    fused_steps_that_nobody_counts: "call of|engine of",
}
TEXT_FAULTS: dict[Fault, str] = {
    the_generator_keeps_its_views: "is of other weights",
    the_generator_keeps_its_pages: "is of other weights",
    caches_of_anybody: "the cache is of other weights",
    caches_of_other_supernets: "the cache is of other weights",
    caches_of_changed_weights: "the cache is of other weights",
}


@pytest.mark.parametrize(("fault", "says"), IMAGE_FAULTS.items(), ids=lambda f: getattr(f, "__name__", ""))
def test_images_find(fault: Fault, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)

    def interleave() -> None:
        for seed in range(40):
            run(Images(seed, tmp_path, monkeypatch))

    with pytest.raises(AssertionError, match=says):
        interleave()


@pytest.mark.parametrize(("fault", "says"), TEXT_FAULTS.items(), ids=lambda f: getattr(f, "__name__", ""))
def test_texts_find(fault: Fault, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)

    def interleave() -> None:
        for seed in range(40):
            run(Texts(seed), 3 * STEPS)

    with pytest.raises(AssertionError, match=says):
        interleave()
