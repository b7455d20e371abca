"""The public names of `subnetact.serving`."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from pathlib import Path

import subnetact
import subnetact.calibration
import subnetact.insertion
import subnetact.nas
from subnetact import serving


def test_no_public_name_hides_a_module() -> None:
    modules = {path.stem for path in Path(serving.__file__).parent.iterdir()}
    assert not modules & set(serving.__all__)


def test_what_public_functions_return_is_public() -> None:
    public = {getattr(serving, name) for name in serving.__all__}
    public |= {getattr(subnetact, name) for name in subnetact.__all__ if name != "errors"}
    for room in (subnetact.calibration, subnetact.insertion, subnetact.nas):
        public |= {getattr(room, name) for name in room.__all__}
    for function in filter(inspect.isfunction, public):
        returned = typing.get_type_hints(function)["return"]
        if dataclasses.is_dataclass(returned):
            assert returned in public, function


def test_the_top_level_exports_the_same_objects() -> None:
    for name in set(serving.__all__) & set(subnetact.__all__):
        assert getattr(serving, name) is getattr(subnetact, name)
