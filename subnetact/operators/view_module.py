"""Modules of a zero-copy view: they share the supernet's tensors and refuse to change them.

`view_module` makes an instance of a subclass of the template's class, without calling `__init__`. Hooks,
submodules and attributes are private to one view; the registries of hooks, parameters and buffers are shared
until a module changes one of them, because private copies would be two thirds of the memory of a view.

A view is kept for all who ask for its subnet. Whoever changes a module of it, other than by its own forward,
has the view alone from then on: it leaves those that are kept (`Keeping`). Hooks stay for all.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import ChainMap, OrderedDict
from collections.abc import Callable, Iterable
from copy import copy, deepcopy
from functools import cache, partial, reduce, wraps
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from subnetact.device import tolerated
from subnetact.errors import ViewError
from subnetact.files.fork import new_lock
from subnetact.operators.packed_copy import follow_
from subnetact.operators.tensor_version import tensor_place
from subnetact.operators.vocabulary import FEATURES
from subnetact.operators.weight_runs import LinearInRuns

HOOKS = tuple(name for name, value in nn.Module().__dict__.items() if isinstance(value, OrderedDict))
_DICTS = ("_parameters", "_buffers", "_modules")
_REGISTRIES = {*HOOKS, *_DICTS, "_non_persistent_buffers_set"}
_SETTINGS = ("config", "generation_config", "feature_info", "pretrained_cfg", "default_cfg", *FEATURES)
_settling = new_lock(threading.RLock)


class _NoHooks(OrderedDict[int, Any]):
    """An empty registry of hooks that many modules share and that therefore has to stay empty."""

    def __setitem__(self, key: int, value: Any) -> None:
        raise ViewError("hooks are registered with the module's register_..._hook methods")

    def __deepcopy__(self, memo: Any) -> _NoHooks:
        return self


_NO_HOOKS: dict[str, OrderedDict[int, Any]] = {name: _NoHooks() for name in HOOKS}


class Keeping:
    """What the modules of one view know of it: who keeps it, and whose its settings are.

    `leave` takes the view from those that are kept for everybody. The view has the settings of the supernet
    until somebody else than its forward reads one of them, and then its own, with its sizes (`state_sizes`).
    """

    def __init__(
        self, view: nn.Module, leave: Callable[[Keeping], None], state_sizes: Callable[[nn.Module], None]
    ) -> None:
        self._view, self._leave, self._state_sizes = weakref.ref(view), leave, state_sizes
        self.settings: Any = None  # the supernet's and its own, which are to stay equal to their copies
        self.copies: Any = None

    def end(self) -> None:
        """Let the view leave, as somebody changes it; a forward may write its own state."""
        if self.outside():
            self._leave(self)

    def settle(self) -> None:
        """Give the view its own settings, if it has none and somebody outside reads them."""
        if self.outside():
            with _settling:
                view = self._view()
                if self.settings is None and view is not None:
                    self.settings = _own_settings_(view)
                    self._state_sizes(view)  # It reads settings.
                    self.copies = deepcopy(self.settings)

    def outside(self) -> bool:
        """Tell whether this thread runs something else than the forward of a module of the view."""
        if torch.compiler.is_compiling():
            return False
        frame: Any = sys._getframe()
        while frame is not None and frame.f_code is not _CALL:
            frame = frame.f_back
        return frame is None or vars(frame.f_locals["self"]).get("_keeping") is not self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # A copy of a view is not kept.


class Registry(dict[str, Any]):
    """The submodules, parameters or buffers of a module; all methods that write call `write`.

    It takes no entries. An empty one can be shared by many modules, and has to stay empty then.
    """

    __slots__ = ()

    def write(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002
        """Call a method of `dict` that writes, or refuse it."""
        raise ViewError("submodules and tensors are registered as attributes of a module")

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)  # A copy is an ordinary dictionary.


def _writing(method: Callable[..., Any]) -> Callable[..., Any]:
    return wraps(method)(lambda self, *args, **kwargs: self.write(method, *args, **kwargs))


for _name in ("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update"):
    setattr(Registry, _name, _writing(getattr(dict, _name)))


class _KeptRegistry(Registry):
    """The registry of a module of a view that is kept; a write lets the view leave."""

    __slots__ = ("keeping",)
    keeping: Keeping

    def write(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.keeping.end()
        return method(self, *args, **kwargs)


_NO_ENTRIES = Registry()


_CALL: Any = nn.Module._call_impl.__code__


def keep_(module: nn.Module, keeping: Keeping) -> None:
    """Give a module of a view, and all inside, registries of its own that tell `keeping` of changes."""
    known = module.__dict__
    if known.get("_keeping") is keeping:
        return
    known["_keeping"] = keeping
    for name in _DICTS:
        if entries := known[name]:
            known[name] = registry = _KeptRegistry(entries)
            registry.keeping = keeping
        else:
            known[name] = _NO_ENTRIES
    for child in known["_modules"].values():
        if child is not None:
            keep_(child, keeping)


class _Setting:
    """An attribute of modules of views that is the view's own for whoever reads it outside of its forward."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, view: Any, cls: Any) -> Any:
        attributes = {} if view is None else view.__dict__
        if self.name not in attributes:
            return getattr(super(_View, cls if view is None else view), self.name)
        keeping: Keeping | None = attributes.get("_keeping")
        if keeping is not None and keeping.copies is None:
            keeping.settle()
        return attributes[self.name]

    def __set__(self, view: Any, value: Any) -> None:
        view.__dict__[self.name] = value

    def __delete__(self, view: Any) -> None:
        del view.__dict__[self.name]


class _View(nn.Module):
    """The base of all modules of views. It refuses whatever would write into shared tensors."""

    __jit_unused_properties__ = ("resize_token_embeddings",)

    @property
    def resize_token_embeddings(self) -> Any:
        """A method that refuses every call, if the template has one that resizes."""
        getattr(super(), "resize_token_embeddings")  # noqa: B009
        return self._refuse_resizing

    def _refuse_resizing(self, *_: Any, **__: Any) -> Any:
        raise ViewError(
            "a view shares its embeddings with every other subnet; resize those of supernet.network, or of "
            "supernet.extract(spec)"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        tensors = [*self.parameters(recurse), *self.buffers(recurse)]
        if any(fn(tensor) is not tensor for tensor in tensors):
            raise ViewError(
                "a view shares its weights with every other subnet and cannot be moved or converted; "
                "move the supernet, or take an own copy with supernet.extract(spec)"
            )
        return self

    def train(self, mode: bool = True) -> _View:
        if mode:
            raise ViewError(
                "a view is for inference: training it would write into other subnets' statistics; "
                "call supernet.train() and supernet(x, subnet=spec), or train supernet.extract(spec)"
            )
        return super().train(mode)

    def requires_grad_(self, requires_grad: bool = True) -> _View:
        if requires_grad:
            raise ViewError("a view's weights belong to every subnet; train supernet.extract(spec) instead")
        return self

    def _load_from_state_dict(self, *_: Any, **__: Any) -> Any:  # a module around the view loads, too
        raise ViewError(
            "loading into a view would change every subnet; load into the supernet or supernet.extract(spec)"
        )

    def reset_parameters(self) -> None:
        raise ViewError("a view's values belong to every subnet; reset those of supernet.extract(spec)")

    reset_running_stats = reset_parameters

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        copied = memo[id(self)] = copy(self)
        copied.__dict__.update(deepcopy(self.__dict__, memo))
        return copied

    def __copy__(self) -> nn.Module:
        keeping: Keeping | None = self.__dict__.get("_keeping")
        if keeping is not None:
            keeping.settle()  # A copy has the sizes of the subnet, too.
        copied: nn.Module = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ViewError(
            "a view shares its weights with every other subnet and cannot be pickled; pickle "
            "supernet.extract(spec), or keep supernet.state_dict() and spec.to_json()"
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return that of an ordinary network: copies of what is a slice of the weights of all subnets."""
        state = super().state_dict(*args, **kwargs)
        inner = "is_whole" not in self.__dict__ and (args or "destination" in kwargs)
        if inner or kwargs.get("keep_vars"):
            return state  # part of the state_dict of the view, or the tensors themselves
        copies: dict[Any, Tensor] = {}
        for name, tensor in state.items():
            if isinstance(tensor, Tensor) and tensor.nbytes < tensor.untyped_storage().nbytes():
                place = tensor_place(tensor)
                if place not in copies:
                    copies[place] = tensor.clone(memory_format=torch.contiguous_format)
                state[name] = copies[place]
        return state

    def __setattr__(self, name: str, value: Any) -> None:
        registry = next((self.__dict__[d] for d in _DICTS if name in self.__dict__[d]), self.__dict__)
        if registry.get(name, self) is value:
            return
        keeping: Keeping | None = self.__dict__.get("_keeping")
        if keeping is not None and name == "training" and value and keeping.outside():
            self.train()
        if registry is not self.__dict__ or isinstance(value, Tensor | nn.Module):
            self._unshare()
        elif keeping is not None:
            keeping.end()
        super().__setattr__(name, value)

    def _unshare(self) -> None:
        keeping: Keeping | None = self.__dict__.get("_keeping")
        if keeping is not None:
            keeping.end()
        for name in (*_DICTS, "_non_persistent_buffers_set"):
            object.__setattr__(self, name, self.__dict__[name].copy())


def _unsharing(register: str) -> Callable[..., Any]:
    """Return a method of `nn.Module` that gives a module registries of its own before it changes one."""

    @wraps(getattr(nn.Module, register))  # torch asks for the arguments of register_buffer
    def method(self: _View, *args: Any, **kwargs: Any) -> Any:
        for name in HOOKS:
            object.__setattr__(self, name, OrderedDict(self.__dict__[name]))
        if register == "register_parameter":  # which others may have, and pruning changes in place
            shared = set(map(id, self._parameters.values()))
            args = tuple(
                nn.Parameter(a, requires_grad=False) if id(a) in shared and a is not None else a for a in args
            )
        if not register.endswith("_hook"):
            self._unshare()
        return getattr(super(_View, self), register)(*args, **kwargs)

    return method


for _name in dir(nn.Module):
    if _name in ("add_module", "__delattr__") or _name.lstrip("_").startswith("register_"):
        setattr(_View, _name, _unsharing(_name))
for _name in _SETTINGS:
    setattr(_View, _name, _Setting(_name))


@cache
def _reading(cls: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """Return a subclass that lets packed copies follow the weights whenever these tensors are read."""

    def reader(name: str) -> property:
        def read(self: nn.Module) -> Any:
            own = self.__dict__
            tensors = own["_parameters"] if name in own["_parameters"] else own["_buffers"]
            if not torch.compiler.is_compiling():
                follow_(tensors)
            return tensors[name]

        return property(read)

    namespace = {name: reader(name) for name in names}
    return type(cls.__name__, (cls,), {"__module__": cls.__module__, "owned_as": cls, **namespace})


@cache
def mixed_class(mixin: type, cls: Any) -> type[nn.Module]:
    """Return a subclass of both, one per pair, in which the methods of the first take precedence."""
    return type(cls.__name__, (mixin, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})


def mix_in_(module: nn.Module, mixin: type) -> nn.Module:
    """Put a class before the one that a module stands for, in place, and return the module.

    Its class keeps its name, and a module of a view stays one.
    """
    cls: Any = type(module)
    mixed: Any = mixed_class(mixin, cls.__mro__[2] if is_view(module) else cls)
    # A plain assignment would give the module's dictionary keys of its own; modules of views share them.
    object.__setattr__(module, "__class__", mixed_class(_View, mixed) if is_view(module) else mixed)
    return module


class Extractable:
    """The base of mixins that an extracted module keeps; its class is made from two that have names."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle an extracted module."""
        kinds: list[Any] = [type(self)]
        while issubclass(kinds[-1], Extractable):
            kinds[-1:] = kinds[-1].__bases__
        return _remade, tuple(kinds), dict(self.__dict__)


class Corrected(Extractable):
    """The base of the mixins that let a module of one subnet add a correction to what it returns."""


def _remade(*kinds: Any) -> nn.Module:
    module: nn.Module = object.__new__(reduce(lambda cls, kind: mixed_class(kind, cls), reversed(kinds)))
    return module


def is_view(module: nn.Module) -> bool:
    """Tell whether a module belongs to a zero-copy view."""
    return isinstance(module, _View)


def module_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module stands for: for a view's module, the class of its template."""
    cls: Any = type(module).__mro__[2] if is_view(module) else type(module)
    cls = vars(cls).get("owned_as", cls)
    while cls.__mro__[1] is LinearInRuns or issubclass(cls.__mro__[1], Corrected):
        cls = cls.__mro__[2]
    return cls  # type: ignore[no-any-return]


def view_module(
    template: nn.Module,
    *,
    parameters: dict[str, Any] | None = None,
    buffers: dict[str, Any] | None = None,
    modules: dict[str, nn.Module | None] | None = None,
    mixin: type | None = None,
    **attributes: Any,
) -> nn.Module:
    """Return a module like the template, in evaluation mode, that shares all that is not given."""
    cls: Any = type(template)
    if mixin is not None:
        cls = mixed_class(mixin, cls)
    packed = tuple(n for n, p in (parameters or {}).items() if p is not None and "packed" in p.__dict__)
    # hasattr, because reading the __dict__ of a tensor makes one.
    packed += tuple(n for n, t in (buffers or {}).items() if t is not None and hasattr(t, "packed"))
    if packed:
        cls = _reading(cls, packed)
    view: nn.Module = object.__new__(mixed_class(_View, cls))
    given = {"_parameters": parameters, "_buffers": buffers, "_modules": modules, **attributes}
    put, no_hooks = object.__setattr__, _NO_HOOKS
    # One object.__setattr__ per name, in the template's order, lets the dictionaries of a class share keys.
    for name, value in template.__dict__.items():
        if name in no_hooks:
            value = value or no_hooks[name]
        elif name in given:
            value = value if given[name] is None else given[name]
        elif name == "training":
            value = False
        put(view, name, value)
    return _rebound(view, template) if "forward" in template.__dict__ else view


def called_module(operator: Any, parameters: Any, buffers: Any, modules: Any, attributes: Any) -> Any:
    """Return a module of the class of an operator's shell for one call, with its settings, without hooks."""
    template = operator.shell
    module: Any = object.__new__(type(template))
    held = module.__dict__
    held.update(template.__dict__)
    if type(module).__call__ is not nn.Module.__call__:  # Otherwise its forward is called, without hooks.
        held.update(_NO_HOOKS)
    held.update(attributes)
    held["_parameters"], held["_buffers"], held["_modules"] = parameters, buffers, modules
    held["training"] = operator.training
    return _rebound(module, template) if "forward" in held else module


def _rebound(module: nn.Module, former: nn.Module) -> nn.Module:
    """Return a module with a forward of its own where a tool has bound one to the `former` module."""
    forward = vars(module).get("forward")
    if forward is not None:
        object.__setattr__(module, "forward", _of_another(forward, former, module, {}))
    return module


def _of_another(value: Any, former: nn.Module, module: nn.Module, functions: dict[int, Any]) -> Any:
    """Return what a tool has made of a forward, with another module in the place of the `former` one."""
    if isinstance(value, nn.Module):
        return module if former in (value, vars(value).get("template")) else value
    if isinstance(value, MethodType):
        parts = [value.__func__, value.__self__]
    elif isinstance(value, partial):
        parts = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, FunctionType) and id(value) not in functions:
        functions[id(value)] = value  # It may read itself.
        read = [n for n in value.__code__.co_names if isinstance(value.__globals__.get(n), MethodType)]
        cells, defaults = [cell.cell_contents for cell in value.__closure__ or ()], value.__defaults__ or ()
        parts = [*cells, *defaults, *map(value.__globals__.get, read)]
    else:
        return functions.get(id(value), value)
    others = [_of_another(part, former, module, functions) for part in parts]
    if all(a is b for a, b in zip(parts, others, strict=True)):
        return value
    if isinstance(value, MethodType):
        return MethodType(*others)
    if isinstance(value, partial):
        count = 1 + len(value.args)
        return partial(others[0], *others[1:count], **dict(zip(value.keywords, others[count:], strict=True)))
    first, count = len(cells), len(cells) + len(defaults)
    names = {**value.__globals__, **dict(zip(read, others[count:], strict=True))}
    settings = value.__name__, tuple(others[first:count]), tuple(map(CellType, others[:first]))
    copied = functions[id(value)] = FunctionType(value.__code__, names, *settings)
    copied.__kwdefaults__ = value.__kwdefaults__
    return copied


def _own_settings_(view: nn.Module) -> tuple[Any, Any]:
    """Give the modules of a view their own copies of settings, in place; return the former and the copies."""
    modules = [vars(module) for module in view.modules()]
    shared = [{name: module[name] for name in _SETTINGS if name in module} for module in modules]
    copies = _copied(shared, {})
    for module, settings in zip(modules, copies, strict=True):
        module.update(settings)
    return shared, copies


def owned(view: nn.Module, originals: Iterable[tuple[str, nn.Module]] = ()) -> nn.Module:
    """Return an ordinary, trainable module with its own copy of all that a view holds; ties are kept.

    `originals` are the modules that those of the view stand for, by name. What refers to one of them, or to
    one of their tensors, then refers to that of the copy.
    """
    done: dict[int, Any] = {}
    tensors: dict[Any, Any] = {}
    module = _own(view, done, tensors)
    memo = done | {id(tensor): copied for tensor, copied in tensors.values()}
    copies = dict(module.named_modules(remove_duplicate=False))
    for path, original in originals:
        if path in copies:
            memo[id(original)] = copies[path]
            for registry in ("_parameters", "_buffers"):
                for name, tensor in vars(copies[path])[registry].items():
                    memo[id(vars(original)[registry].get(name))] = tensor
    memo.pop(id(None), None)
    plain = [{n: v for n, v in vars(m).items() if n not in _REGISTRIES} for m in done.values()]
    for copied, attributes in zip(done.values(), _copied(plain, memo), strict=True):
        for name, value in attributes.items():
            target = memo.get(id(value())) if isinstance(value, weakref.ref) else None
            copied.__dict__[name] = value if target is None else weakref.ref(target)
    return module


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy, in which that alone stays the same object which cannot be copied, as a lock."""
    trial: Any = ChainMap({}, memo)
    with tolerated():  # whatever an object says that cannot be copied
        made = deepcopy(value, trial)
        memo.update(trial.maps[0])
        return made
    return _copied_apart(value, memo)


def _copied_apart(value: Any, memo: dict[int, Any]) -> Any:
    """Return a copy of an object whose members are copied one by one, or the object if it has none."""
    if isinstance(value, Tensor):
        made = value.detach().clone()
    elif type(value) in (tuple, set, frozenset):
        made = type(value)(_copied(inner, memo) for inner in value)
    else:
        try:
            made = copy(value)
        except Exception:  # as of a lock
            return value
    memo[id(value)] = made
    if isinstance(made, list):
        made[:] = [_copied(inner, memo) for inner in made]
    elif isinstance(made, dict):
        made.update({name: _copied(inner, memo) for name, inner in made.items()})
    if made is not value:
        members = getattr(made, "__dict__", {})
        members.update({name: _copied(inner, memo) for name, inner in members.items()})
    return made


def _own(view: nn.Module, done: dict[int, nn.Module], tensors: dict[Any, Any]) -> nn.Module:
    if id(view) in done:
        return done[id(view)]
    module: nn.Module = object.__new__(module_class(view))
    done[id(view)] = module
    module.__dict__.update(view.__dict__)
    _rebound(module, view).__dict__.update({name: OrderedDict(view.__dict__[name]) for name in HOOKS})
    module._non_persistent_buffers_set = set(view._non_persistent_buffers_set)

    def copied(tensor: Any, trains: bool) -> Any:
        if tensor is None:
            return None
        key = trains, tensor_place(tensor)
        if key not in tensors:
            own = tensor.detach().clone(memory_format=torch.contiguous_format)
            if trains:
                own = nn.Parameter(own, requires_grad=tensor.is_floating_point())
            tensors[key] = tensor, own  # The tensor is kept, so that no other gets its storage.
        return tensors[key][1]

    given: dict[str, Any] = view.in_one_piece if isinstance(view, LinearInRuns) else view._parameters
    module._parameters = {name: copied(p, trains=True) for name, p in given.items()}
    module._buffers = {name: copied(b, trains=False) for name, b in view._buffers.items()}
    module._modules = {
        name: None if m is None else _own(m, done, tensors) for name, m in view._modules.items()
    }
    return module
