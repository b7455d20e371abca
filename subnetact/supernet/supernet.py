"""Supernet: a network with operators, any subnet of which runs in place."""

from __future__ import annotations

import hashlib
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback

from subnetact.errors import InsertError, ViewError
from subnetact.files.tensors import SHARD_BYTES, tensor_bytes
from subnetact.operators import SubnetNorm
from subnetact.operators.actuation import OF_LAYERS, Actuation, Run, leave_, plain_trainer_error
from subnetact.operators.base import ReadThrough, exchange_modules_, template_of
from subnetact.operators.correction import merge_
from subnetact.operators.kernel_table import require_precision
from subnetact.operators.outside_modes import outside_modes
from subnetact.operators.shards import is_sharded, require_whole
from subnetact.operators.tensor_version import storage_id
from subnetact.operators.view_module import owned
from subnetact.space import SubnetSpace
from subnetact.spec import FLOAT32, PRECISIONS, SubnetSpec
from subnetact.supernet.bind import operators_in
from subnetact.supernet.card import Card
from subnetact.supernet.check import CheckReport, check
from subnetact.supernet.compiled_call import compiled_call
from subnetact.supernet.generation import Generation, Weights
from subnetact.supernet.load import after_outer_load, before_outer_load, held_tensors, load_
from subnetact.supernet.norm_table import NormTable, required_table
from subnetact.supernet.precision import PrecisionSettings, put_precision_
from subnetact.supernet.proved_inputs import ProvedInputs
from subnetact.supernet.stated_sizes import state_sizes_
from subnetact.supernet.statistics import (
    batch_norms,
    came_trained,
    follow_training_,
    statistics_of_largest,
)
from subnetact.supernet.views import Views, bound_view, private_view


@dataclass(frozen=True)
class InsertReport:
    """What `insert_` did.

    Attributes:
        elastic: name of a module -> the operator that replaced it, in words.
        fixed: the names of the modules with weights that were not replaced.
    """

    elastic: Mapping[str, str] = field(default_factory=dict)
    fixed: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{name}: {operator}" for name, operator in self.elastic.items()]
        return "\n".join([*lines, f"fixed: {', '.join(self.fixed) or 'nothing'}"])


def as_supernet(value: object) -> Supernet:
    """Return the argument if it is a supernet that still has its operators; otherwise raise InsertError.

    ViewError tells of sharded weights.
    """
    if not isinstance(value, Supernet):
        raise InsertError(
            f"expected a Supernet, got {type(value).__name__}; subnetact.insert_(network, space, elastic) or "
            "ofa_adapters.load(family, checkpoint) make one"
        )
    require_whole(value._present())
    value._generation.look()
    return value


def supernet_of(model: Any) -> Supernet:
    """Return the supernet that a module is, or of whose network it is, or around which others' tools put it.

    Raises:
        InsertError: there is none, or nobody keeps it any longer, or FSDP1 has flattened its parameters.
    """
    modules = model.modules() if isinstance(model, nn.Module) else ()
    for module in modules:
        if type(module).__name__ == "FullyShardedDataParallel":
            raise InsertError(
                "FSDP1 (FullyShardedDataParallel) flattens the parameters of which subnets are slices; shard "
                "with torch.distributed.fsdp.fully_shard (FSDP2): every layer, and supernet.network"
            )
        if isinstance(module, Supernet):
            return module
        if isinstance(actuation := vars(module).get("actuation"), Actuation):
            supernet = actuation.supernet()
            if supernet is None:
                raise InsertError(
                    "this network is a copy, or nobody keeps the supernet that insert_ returned; keep it, "
                    "and give its network"
                )
            return supernet  # type: ignore[no-any-return]
    return as_supernet(model)


def fingerprint_of(space: str, state: Mapping[str, Tensor]) -> str:
    """Return the hash of the id of a space and of weights by name, as 16 hexadecimal digits."""
    digest = hashlib.sha256(space.encode())
    for name, tensor in state.items():
        digest.update(name.encode())
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()[:16]


class Supernet(ReadThrough):
    """One copy of the weights, and every subnet as a zero-copy view of it.

    `insert_` and `ofa_adapters.load` make supernets. Parameters, buffers and submodules have the names of the
    network, in the state_dict and everywhere else. Its settings and methods are read through, `config` or
    `gradient_checkpointing_enable()` for example; what runs elastic modules belongs to subnets:
    `supernet.subnet(spec).generate(...)`.

    Whatever takes a specification raises `SpecError` if it is malformed, `ForeignSpec` if it is of another
    space.

    Args:
        network: the network, with operators in it.
        space: the search space.
        report: what became elastic and what stayed fixed.

    Attributes:
        network: as given; no submodule, because the supernet has its tensors and submodules as its own.
        space: as given.
        report: as given.
        cached_views: how many views are kept; beyond that, the least recently used one is evicted.
        origin: how bundles build the supernet again: `{"name": family, "constructor": arguments}`. If None,
            loading a bundle needs a function that builds the supernet.
        description: what `insert_` found out about the model; None if it was described by hand.
        precision: the arguments of `enable_precision`. If None, all subnets are float32.
        card: the named subnets, their quality, and the licence, which bundles keep.
        proved: the forms of the inputs for which subnets were proved; None if these are not known.
        state: the names of the buffers that the forward writes itself, as far as examples and checks showed;
            they are no weights, and every view has its own.
        on_bind: called with the supernet, every new view or extracted network, its subnet and the weights
            that it reads, before anybody uses it. Key-value caches are guarded by it.

    Source:
        SuperServe, section 3.

    Example:
        >>> supernet = ofa_adapters.load("ofa_resnet50", "checkpoint.pth")
        >>> y = supernet(x, subnet=supernet.space.smallest())
    """

    _behind = "_network"
    cached_views: int = 1024
    origin: dict[str, Any] | None = None
    description: Any = None
    precision: PrecisionSettings | None = None
    card: Card = Card()
    proved: ProvedInputs | None = None
    state: frozenset[str] = frozenset()
    on_bind: Callable[[Supernet, nn.Module, SubnetSpec, Weights], None] | None = None

    def __init__(self, network: nn.Module, space: SubnetSpace, report: InsertReport) -> None:
        super().__init__()
        self.space = space
        self.report = report
        self._hold(network)
        full = space.largest()
        largest = Run(full, space.resolve(full), is_largest=True)
        operators = operators_in(network)
        norms = [operator for operator in operators if isinstance(operator, SubnetNorm)]
        self._actuation = Actuation(largest, NormTable(space.id).to_like(norms))
        network.register_forward_pre_hook(self._actuation.begin)
        network.register_forward_hook(self._actuation.end, always_call=True)
        self._actuation.supernet = weakref.ref(self)
        for operator in operators:
            operator.actuation = self._actuation
        self._views = Views()
        self._generation = Generation(self, self._views, came_trained(norms))
        self._warned = False
        self._checked: dict[str, int] = {}  # shapes -> the generation for which they passed
        self.register_load_state_dict_pre_hook(before_outer_load)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(after_outer_load)  # type: ignore[no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        """Return what pickle and copies take along; views and locks are made again."""
        original = self.generation.is_original
        state = {**self.__dict__, "_views": None, "_original": original, "_checked": {}}
        del state["_generation"]
        return {**state, "_generation": self.generation.witness()}  # the last, when tensors were copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Supernet:
        """Return a copy with weights and statistics of one moment, with which work that takes long begins.

        Args:
            memo: what was copied before, as `copy.deepcopy` gives it.

        Raises:
            StaleWeights: weights were changed in place by another thread meanwhile.
        """
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        with torch.inference_mode(False), self.generation.unchanged():
            copied.__setstate__(deepcopy(self.__getstate__(), memo))
            passed = [shapes for shapes, at in list(self._checked.items()) if at == self._generation.number]
        copied._checked = dict.fromkeys(passed, copied._generation.number)
        return copied

    def __copy__(self) -> Supernet:
        raise ViewError(
            "a shallow copy of a supernet does not notice when the weights that both share are exchanged; "
            "use the supernet itself, or copy.deepcopy(supernet)"
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._actuation.supernet = weakref.ref(self)
        self._views = Views()
        self._generation = Generation(self, self._views, self.__dict__.pop("_original"))

    @property
    def network(self) -> Any:
        """The network with operators in it; whoever has it may change it, which the next call notices."""
        if not sys._getframe(1).f_globals.get("__name__", "").startswith("subnetact."):
            self._generation.look()
        return self.__dict__["_network"]

    @property
    def training(self) -> bool:
        """Whether the network is in training mode; whoever has it may put it there."""
        network: nn.Module = self.__dict__["_network"]
        return network.training

    @training.setter
    def training(self, mode: bool) -> None:
        if (network := self.__dict__.get("_network")) is not None:
            network.training = mode

    @property
    def norms(self) -> NormTable:
        """The statistics rows of calibrated subnets. Assign another table to use a copy of that table."""
        if self._actuation.moving is not None:
            follow_training_(self)
        table: NormTable = self._actuation.norms
        return table

    @norms.setter
    def norms(self, table: NormTable) -> None:
        norms = batch_norms(self._present()).values()
        self._actuation.norms = required_table(table, self.space.id).to_like(norms)

    @property
    def active(self) -> SubnetSpec:
        """The subnet that `supernet(x)` runs; the largest one until `actuate` is called."""
        return self._actuation.active.spec

    # -- precision -------------------------------------------------------------------------------

    def enable_precision(self, *precisions: str, keep: Sequence[str] = (), last: bool = False) -> SubnetSpace:
        """Let subnets choose a precision: `space` gets one more axis, `precision`. Return the new space.

        At int8, linear layers and convolutions slice one int8 copy of the full weights, which follows them.
        Activations are quantised in every call, with one scale per row of a linear layer and per sample of a
        convolution, so that an answer does not depend on its batch mates; sums are int32. Grouped
        convolutions, normalisation, softmax, and the first and (without `last`) the last layer stay at
        float32. At bfloat16 the same layers read a bfloat16 copy. Statistics rows are those of the same
        subnet at float32, and training uses the full weights.

        Args:
            precisions: `int8`, `bfloat16` or both.
            keep: the names of further modules that stay at float32, with all their submodules.
            last: whether the last layer follows the precision, too.

        Raises:
            PrecisionError: the network has no layer that could run at a lower precision, `keep` names no
                module, or this machine or build of torch has no kernel that is right and faster than
                float32; `python -m subnetact.profile --machine` prints what it has.
            SpecError: a precision is unknown, or precisions were enabled before.

        Example:
            >>> space = supernet.enable_precision("int8")
            >>> supernet(x, subnet=space.at_precision(spec, "int8"))
        """
        network = self._present()
        space = self.space.with_precision(*precisions)
        settings = PrecisionSettings(tuple(p for p in PRECISIONS if p in precisions), tuple(keep), bool(last))
        for precision in settings.precisions:
            require_precision(precision, self.device)
        with self._generation.lock:
            put_precision_(network, settings, len(self.space.dimensions))
            self.space, self.precision = space, settings
            actuation = self._actuation
            runs = [actuation.run_of(space, run.spec) for run in (actuation.largest, actuation.active)]
            actuation.largest, actuation.active = runs
            self._generation.move(same=True)
        return space

    @property
    def packs(self) -> bool:
        """Whether views have packed copies of linear layers' slices that are several runs of the weight.

        Such are fused layers, and heads of which a subnet keeps the first ones of every group. If it is set
        to False, these layers multiply by each run where it is: all subnets together take the memory of the
        largest one, and every call takes a little longer. Results may differ by rounding. Slices that are no
        weights of linear layers, or that have a lower precision, are packed as before.
        """
        return all(operator.packs for operator in operators_in(self.network))

    @packs.setter
    def packs(self, packs: bool) -> None:
        with self._generation.lock:
            for operator in operators_in(self.network):
                operator.packs = bool(packs)
            self._generation.move(same=True)

    # -- subnets ---------------------------------------------------------------------------------

    def subnet(self, spec: SubnetSpec) -> nn.Module:
        """Return the view of the subnet `spec`: an ordinary module that shares the supernet's storage.

        It is in evaluation mode and follows changes of weights in place. After `load_state_dict` and `to` it
        keeps the former weights and their memory; call this method again. Many threads may call this method
        and run views at the same time; all get the same module while it is cached. A subnet that was never
        calibrated runs on the shared BatchNorm statistics; the first one gives an
        `UncalibratedSubnetWarning`.

        Whoever changes a module of a view has that view alone: others get a new one. Settings (`config`,
        `generation_config`, `feature_info`, `pretrained_cfg`) become the view's own when something else than
        its forward reads them, and state the sizes of the subnet as those of `extract` do. Values that are
        written into a parameter of a view without a trace (`parameter.data = other`) reach other subnets.

        `torch.compile(view)` reads packed copies as they are and does not let them follow: after changes in
        place call `refresh` and compile the new view, or use `torch.compile(supernet)`.
        """
        if not isinstance(spec, SubnetSpec):
            spec = self.space.check(spec)
        if self._generation.notice_replacements():
            with self._generation.lock:
                return bound_view(self, spec, self.norms.get(spec), fresh=True)
        norms = self.norms
        with self._views.lock:
            view = self._views.get(spec, norms.get(spec))
        if view is None:
            spec = self.space.check(spec)
            with self._generation.lock:  # Without it, nobody exchanges weights or clears the views.
                view = self._views.keep(spec, *private_view(self, spec), self)
        return view

    @property
    def device(self) -> torch.device:
        """The device of the weights, the CPU if there are none."""
        return next((weight.device for weight in self.parameters()), torch.device("cpu"))

    @property
    def generation(self) -> Generation:
        """Tells everything that outlives a change of the weights whether they have changed."""
        self._generation.notice_replacements()
        return self._generation

    def actuate(self, spec: SubnetSpec) -> None:
        """Make `supernet(x)` run the subnet `spec` from now on. Forward passes under way are not affected."""
        spec = self.space.check(spec)
        self.subnet(spec)
        self._actuation.active = self._actuation.run_of(self.space, spec)

    def forward(self, *args: Any, subnet: SubnetSpec | None = None, **kwargs: Any) -> Any:
        """Run a subnet.

        In training mode gradients reach the supernet's parameters, and BatchNorm normalises with the batch.
        The largest subnet updates running statistics and other buffers; other subnets update copies.

        `torch.func.functional_call(supernet, parameters, ...)` runs on the given parameters and leaves no
        trace in cached views. While it runs, other threads must not call the supernet; engines may run.
        `torch.compile(supernet)` compiles the network of every subnet that runs, without `fullgraph=True`;
        torch's log tells when it keeps no more versions of one; compiled views share a limit.

        Args:
            args: the inputs of the network.
            subnet: the subnet to run; `active` stays as it is. If None, that of `running`, or the active one.
            kwargs: the inputs of the network that are given by name.

        Returns:
            What the network returns.
        """
        if torch.compiler.is_compiling() or get_eval_frame_callback() is not None:
            return compiled_call(self, subnet, args, kwargs)
        spec = self._actuation.now().spec if subnet is None else subnet
        if not self.training and not is_sharded(self):
            return self.subnet(spec)(*args, **kwargs)
        asked = self._actuation.asked()
        with nullcontext() if asked is not None and asked.spec == spec else self.running(spec):
            return self.network(*args, **kwargs)

    def running(self, spec: SubnetSpec) -> AbstractContextManager[None]:
        """Let `supernet.network(...)` run a subnet in this thread or task, instead of the active one.

        The network's own modules run, with their hooks: gradients reach the parameters, and checkpoints are
        computed again for the same subnet, also by a backward pass that comes later. In training mode,
        BatchNorm normalises with the batch. The largest subnet updates running statistics and other buffers;
        other subnets update copies.

        Args:
            spec: the subnet to run.

        Returns:
            A context, which gives nothing; the subnet runs inside the `with` statement.

        Raises:
            TrainingError: the forward needs all processes, as that of sharded weights or of SyncBatchNorm,
                and others run another subnet; or its weights are tensor-parallel.

        Example:
            >>> with supernet.running(supernet.space.smallest()):
            ...     loss = supernet.network(**batch).loss
            >>> loss.backward()
        """
        run = self._actuation.run_of(self.space, spec)
        with self._generation.lock:  # A forked process may have none of the other part of the weights.
            network = self._present()
        return self._actuation.running(run, network)

    def extract(self, spec: SubnetSpec) -> nn.Module:
        """Return an ordinary network of the subnet `spec`, in evaluation mode, with its own weights.

        It has the statistics that the subnet runs on, and can be trained (not at a lower precision), moved,
        saved and exported like any other. Tied parameters that are sliced in the same way stay tied. It
        shares no object that can change with the supernet; only what cannot be copied, such as a lock, is the
        same. What a model of timm says of its features, and the configuration of a language model of Hugging
        Face of its kept layers, are the sizes of the subnet, unless a forward reads them. A field that layers
        have not alike is refused on reading, and is in `config.per_layer_config[i]`; `num_hidden_layers`
        counts skipped layers. `save_pretrained` of a Hugging Face model writes a model of its library with
        the sizes of the subnet, or refuses; `insertion.as_pretrained` returns that model.
        """
        spec = self.space.check(spec)
        self._generation.look()
        with outside_modes(), self._generation.lock:
            fresh = spec.precision == FLOAT32
            row = self.norms.get(spec)
            view = bound_view(self, spec, row, fresh, hooked=False)
            named = self._present().named_modules(remove_duplicate=False)
            network = owned(view, ((p, o) for p, m in named for o in (m, template_of(m)))).eval()
            for path, correction in () if row is None else row.corrections().items():
                merge_(network.get_submodule(path), correction, path)
            state_sizes_(network, self._present(), self.space, spec)
            if self.on_bind is not None:
                self.on_bind(self, network, spec, self.generation.weights.of_copy(network, self.state))
            return network

    def remove(self) -> nn.Module:
        """Put every module that an operator replaced back into its place, and return the ordinary network.

        It computes what the largest subnet did. The supernet cannot be used any more afterwards; views and
        extracted networks can.

        Raises:
            InsertError: the operators were removed before.

        Example:
            >>> supernet = insert_(model, example=x)
            >>> assert supernet.remove() is model
        """
        elastic = self._present()
        for path, tensor in statistics_of_largest(self).items():
            norm, _, name = path.rpartition(".")
            elastic.get_submodule(norm)._buffers[name] = tensor
        operators = operators_in(elastic)
        for operator in operators:
            operator.template.training = operator.training
        leave_(elastic)
        exchange_modules_(elastic, {operator: operator.template for operator in operators})
        network: nn.Module = template_of(elastic)
        vars(network).pop(OF_LAYERS, None)
        self._generation.end()
        self._hold(nn.Module())
        self.refresh()
        return network

    def check(self, x: Any, compare: bool = True, *, thorough: bool = True) -> CheckReport:
        """Run subnets in which all choices that meet occur, and prove that the slices fit together.

        The subnets are the corners of the space (the largest subnet, the smallest one, and each axis alone at
        its smallest) and, if they are compared, so many that every pair of choices of two slots that meet
        occurs. Each runs with NaN in all weights that it does not use, and is then compared with the original
        network in which these weights are zero and skipped layers are identities, which finds slices of wrong
        rows. This happens on a private copy and takes about two forward passes per subnet. A comparison
        counts only if the batch, or another one like it, shows what the narrowed modules compute.

        Args:
            x: a batch that the network takes, a tensor or a tuple or dictionary of them; one input suffices.
                Floating-point tensors that are all zero are replaced by random ones, if these run.
            thorough: if False, only the corners run, on this batch alone.
            compare: whether to compare with the original network, and to refuse networks that change the
                output of a layer that can be skipped before the next layer gets it. False is for networks
                whose forward normalises over an elastic width by itself.

        Returns:
            Which subnets ran and which were compared.

        Raises:
            SpecError: the largest subnet does not run on the batch, or the batch is empty.
            InsertError: another subnet does not run, depends on weights that it does not use, or differs
                from the original network. The message names the module and the way out.

        Example:
            >>> print(supernet.check(torch.randn(1, 3, 224, 224)))
        """
        return check(self, x, compare, thorough)

    def refresh(self) -> None:
        """Drop all cached views, after weights were changed in a way that cannot be seen.

        These are changes through `parameter.data` or NumPy, in tensors that were made in inference mode, and
        of plain attributes of modules (`supernet.network.scale = 2.0`). Copies, fused programs, key-value
        caches and adopted statistics learn of them from this method only; engines make programs again.
        Other modules and other storage (`parameter.data = other`, `parameter.set_`) are noticed after
        `network` was read, and by whatever takes long.
        """
        self._generation.move(in_place=True)

    def fingerprint(self) -> str:
        """Return a hash of the space and of all weights, as 16 hexadecimal digits.

        Latency tables and files of unfinished work carry it, so that they are not used with other weights.
        """
        number = None
        while number != self.generation.number:  # Weights may be exchanged in place meanwhile.
            with self._generation.lock:
                number, state = self._generation.number, self._present().state_dict()
            found = fingerprint_of(self.space.id, state)
        return found

    def save_pretrained(
        self,
        folder: str | PathLike[str],
        *,
        subnets: Mapping[str, Any] | None = None,
        quality: Mapping[str, Mapping[str, float]] | None = None,
        source: str | None = None,
        tables: Mapping[str, Any] | None = None,
        licence: str | None = None,
        factory: Mapping[str, Any] | None = None,
        shard_bytes: int = SHARD_BYTES,
        only: Any = None,
        example: Any = None,
    ) -> None:
        """Write a folder that the network's own library opens as the largest subnet, or one subnet alone.

        `subnetact.from_pretrained` reads it with every size. `config.json` and `model.safetensors` are what
        transformers or timm write; for other networks there is a plain state_dict. `elastic.json` has
        everything else: the space, the subnets by name and what is known of them. `docs/bundle.md` describes
        the format.

        Args:
            folder: a new or empty folder, or one that holds a bundle, which is then replaced; files that
                others have added to it stay.
            subnets: name -> a specification, or what `space.parse` takes, `per_layer_config` for example. If
                None, those that the supernet was loaded with, or the smallest and the largest. BatchNorm
                statistics are written of these and of the largest.
            quality: name of a subnet -> what was measured -> value. `accuracy` is in percent, and what
                engines that load the bundle serve by.
            source: where the figures of `quality` come from: the data, and how it was measured.
            tables: latency tables by name; each says what machine it was measured on.
            licence: the licence of the weights, `apache-2.0` for example.
            factory: `{"library": "torchvision", "name": "resnet18", "arguments": {"num_classes": 10}}`, which
                makes the original network again; the library may also be `timm` or `transformers`. If None,
                it is found if it can be; loading the bundle of any other network needs `model=`.
            shard_bytes: the most bytes of one file of weights of a model of transformers; others have one.
            only: the name of a subnet, a specification, or what `space.parse` takes. If given, the folder is
                no bundle but holds this subnet alone, cut out as a model of the library's own class that
                needs nothing of this package; its README.md shows how to open it.
            example: with `only`, a batch that the model takes: both must compute the same on it.

        Raises:
            FileFormatError: the folder holds something else than a bundle, or, with `only`, anything.
            InsertError: the class of the library cannot have the shapes of the subnet `only`.
            SpecError: a subnet is not of the space, a figure is of no named subnet, the factory makes another
                network, or the space cannot read what it writes.
            StaleWeights: another thread changed weights in place meanwhile. Nothing is then written.

        Example:
            >>> supernet.save_pretrained("folder", subnets={"small": spec}, licence="mit")
            >>> small = subnetact.from_pretrained("folder", subnet="small")
            >>> supernet.save_pretrained("small", only="small", example=x)
        """
        from subnetact import save_cut_out, save_folder  # type: ignore[attr-defined]

        self._generation.look()
        card = self.card.extended(self.space, subnets, quality, source, licence, factory)
        if only is not None:
            save_cut_out(self, folder, card, only, example, shard_bytes)
        else:
            save_folder(self, folder, card, tables or {}, None, shard_bytes=shard_bytes)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        commit_message: str = "Upload a bundle of subnetact",
        **saving: Any,
    ) -> Any:
        """Upload a bundle with its model card to the hub of Hugging Face, as one commit.

        Args:
            repo_id: the name of the repository, `me/model`, which is made if there is none.
            private: whether a new repository is private. If None, the hub decides.
            token: the token of the hub. If None, that of `hf auth login`.
            revision: the branch. If None, the main one.
            create_pr: whether to open a pull request instead of a commit to the branch.
            commit_message: of the commit.
            saving: arguments of `save_pretrained`: `subnets`, `quality`, `licence` and so on.

        Returns:
            The `CommitInfo` of huggingface_hub.

        Raises:
            MissingExtra: huggingface_hub is not installed.

        Example:
            >>> supernet.push_to_hub("me/model", subnets={"half": spec}, licence="mit")
            >>> supernet = subnetact.from_pretrained(huggingface_hub.snapshot_download("me/model"))
        """
        from subnetact import push_bundle  # type: ignore[attr-defined]

        commit = {"revision": revision, "create_pr": create_pr, "commit_message": commit_message}
        return push_bundle(self, repo_id, private, token, commit, saving)

    # -- nn.Module --------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__ or hasattr(type(self), name):  # Submodules may have the same name.
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name == "hf_device_map" and sys._getframe(1).f_globals.get("__name__") == "transformers.trainer":
            raise plain_trainer_error("a Trainer of a Supernet")  # It reads this first.
        if "_generation" in self.__dict__:  # Whoever has a part of the network may change it.
            self._generation.look()
        return super().__getattr__(name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return that of the network, with the statistics of the largest subnet; `norms.save` saves all."""
        prefix = kwargs.get("prefix", "".join(args[1:2]))
        with self._generation.lock:
            state = self._present().state_dict(*args, **kwargs)
            state.update({prefix + name: t for name, t in statistics_of_largest(self).items()})
            return state

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        assign: bool = False,
        *,
        norms: NormTable | None = None,
    ) -> Any:
        """Load a state_dict of the network, atomically for everybody who runs subnets meanwhile.

        The parameters move to new storage and stay the same objects, so optimizers keep them. A forward pass
        (in evaluation mode) that has begun ends on the former weights, and later ones run on the new ones;
        none sees a mixture, and engines change all subnets at once. Meanwhile there are two copies in memory.
        Parameters in shared memory, those of subclasses of `nn.Parameter`, and a supernet that is loaded as a
        part of another module are loaded in place. So does `supernet.network.load_state_dict`, for which
        nothing may run, and which leaves all rows of `norms` as they are: calibrate again.

        Args:
            state_dict: tensors by the names of the network. If all names have one of the prefixes `module.`,
                `network.` and `_orig_mod.`, which wrappers add, the prefix is dropped. One name of a tied
                tensor suffices.
            strict: whether all tensors must be there, and no others. Shapes must fit in any case.
            assign: whether to use the given tensors themselves instead of copying them.
            norms: the statistics rows of these weights, which replace the former ones at the same moment.
                Without it, rows stay if the weights are the same, and are dropped with an
                `UncalibratedSubnetWarning` if not; engines then refuse these subnets (`NotCalibrated`). A row
                that `insert_` or `calibrate` adopted follows the network's own statistics. Give
                `norms=supernet.norms` to keep all rows.

        Returns:
            What `nn.Module.load_state_dict` returns.

        Raises:
            CheckpointError: what is given does not fit. Nothing is then loaded.
            ForeignSpec: the norm table is of another space.
        """
        return load_(self, state_dict, strict, assign, norms)

    def train(self, mode: bool = True) -> Supernet:
        """Put the network into training mode, or out of it; `mode` is as in torch."""
        self._generation.look()
        self.network.train(mode)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Supernet:
        with self._generation.lock:
            original = self.generation.is_original
            before = [storage_id(tensor) for tensor in held_tensors(self)]
            self._generation.begin_exchange()
            try:
                self.network._apply(fn, recurse)
                self._actuation.norms.apply(fn)
            finally:
                self._generation.move(same=before == [storage_id(tensor) for tensor in held_tensors(self)])
                if original:
                    self._generation.note_original()
        return self

    # -- inner parts ------------------------------------------------------------------------------

    def _present(self) -> nn.Module:
        """Return the network, unless it was given back."""
        network: nn.Module = self.__dict__["_network"]
        if type(network) is nn.Module:
            raise InsertError(
                "the supernet's operators were removed; call insert_ again, or use what remove() returned"
            )
        return network
