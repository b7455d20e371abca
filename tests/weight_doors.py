"""A machine that opens all doors to the weights in random order, and compares every answer.

What outlives a change of the weights (views, copies, fused programs, statistics, calibrations, bundles) is
driven through random interleavings of the doors that change them. The schedule is a fake one: batches that
are given and files that are written are where other doors open. Every answer is compared with that of a plain
network, written down in `elastic_convolutions.py`, loaded with one checkpoint.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_convolutions import Convolutions, Rows, State, new_supernet, plain
from torch import Tensor, nn

import subnetact
from subnetact.elastic import folder as bundles
from subnetact.engine import fusion_plan
from subnetact.errors import StaleWeights
from subnetact.files.documents import FolderFormat
from subnetact.files.tensors import read_tensors
from subnetact.spec import SubnetSpec
from subnetact.supernet.norm_table import NormRow, NormTable

LAYERS = 2


X = torch.randn(2, 8, 5, 5, generator=torch.Generator().manual_seed(1))
BATCHES = [torch.randn(4, 8, 5, 5, generator=torch.Generator().manual_seed(i)) for i in (2, 3)]


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
        network = Convolutions(LAYERS)
        network.load_state_dict(self.new_state(network.state_dict()))
        self.supernet = new_supernet(network)
        space = self.supernet.space
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
