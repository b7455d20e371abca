"""A description of what can be elastic: choices, the space, editing, JSON, and what is refused."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

import subnetact
from subnetact.errors import FileFormatError, InsertError
from subnetact.insertion.description import DepthStage, Description, Group, Member, sizes_of_choices
from subnetact.operators import ElasticAttribute, SubnetNorm, WeightSlice
from subnetact.operators.segments import Segments


def block() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(8, 12, 1), nn.BatchNorm2d(12), nn.Conv2d(12, 8, 1))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(block(), block())).eval()


def description() -> Description:
    members = (
        Member("0.0.0", "out", WeightSlice, 4),
        Member("0.0.1", "channels", SubnetNorm, 4),
        Member("0.0.2", "in_", WeightSlice, 4),
    )
    group = Group("0.heads", "heads", 3, members, sizes=sizes_of_choices(3, (0.5, 0.75)))
    stage = DepthStage("depth", ("0.1",), {0: 0, 1: 1})
    return Description("model", [group], [stage], {"0.2.width": "it is the output"})


def test_shares_are_rounded_to_the_unit_and_sizes_are_taken_as_they_are() -> None:
    assert sizes_of_choices(64, (0.5, 0.75)) == {0.5: 32, 0.75: 48, 1.0: 64}
    assert sizes_of_choices(36, (0.5,), unit=8) == {0.5: 16, 1.0: 36}
    assert sizes_of_choices(3, (0.5, 0.75)) == {0.5: 1, 0.75: 2, 1.0: 3}
    assert sizes_of_choices(8, (0.01, 1)) == {0.01: 1, 1.0: 8}
    assert sizes_of_choices(8, (4, 1)) == {1: 1, 4: 4, 8: 8}
    assert sizes_of_choices(2, (0.25,), least=0) == {0.25: 0, 1.0: 2}


@pytest.mark.parametrize("choice", [0, 9, 1.5, -0.1, True, "half"])
def test_choices_outside_the_network_are_refused(choice: float) -> None:
    with pytest.raises(InsertError, match="choice"):
        sizes_of_choices(8, (choice,))


def test_members_follow_multiples_of_the_size() -> None:
    space = description().space
    row = dict(zip(space.dimensions, space.resolve(space.spec(depth=0, heads=0.75)), strict=True))
    assert row == {"0.1.keep": 0, "0.heads": 2, "0.heads*4": 8}


def test_json_gives_the_same_description_and_spaces_can_be_pickled() -> None:
    first = description().override({"0.0.2": WeightSlice.on(in_="0.heads*4"), "0.1.0": None})
    again = Description.from_json(first.to_json())
    assert again.to_json() == first.to_json()
    assert again.space.id == first.space.id
    assert again.elastic == first.elastic
    assert pickle.loads(pickle.dumps(first.space)).id == first.space.id


@pytest.mark.parametrize(
    "text", ["", "{}", '{"kind": "subnetact.description", "schema": 1}', "[1]", '{"kind": 3}']
)
def test_other_documents_are_refused(text: str) -> None:
    with pytest.raises(FileFormatError, match="description"):
        Description.from_json(text)


@pytest.mark.parametrize(
    ("written", "damaged"),
    [
        ('"WeightSlice"', '"os"'),
        ('"multiple": 4', '"multiple": 0'),
        ('"multiple": 4', '"multiple": true'),
        ('"full": 3', '"full": "3"'),
        ('"start": null', '"start": -1'),
        ('"0.75": 2', '"NaN": 2'),
        ('"0.75": 2', '"[]": 2'),
        ('"0.75": 2', '"0.75": 2.0'),
        ('"name": "depth"', '"title": "depth"'),
        ('"it is the output"', "null"),
        ('"overrides": {}', '"overrides": []'),
    ],
)
def test_fields_of_other_kinds_are_damage(written: str, damaged: str) -> None:
    document = description().to_json()
    assert written in document
    with pytest.raises(FileFormatError, match="damaged"):
        Description.from_json(document.replace(written, damaged))


def test_editing() -> None:
    edited = description().with_choices("heads", [1, 2]).with_choices("dep*", [1.0])
    assert edited.groups["0.heads"].sizes == {1: 1, 2: 2, 3: 3}
    assert edited.stages["depth"].sizes == {1.0: 1}
    less = edited.without("0.*")
    assert less.refused["0.heads"] == "left out by the user"
    assert [axis.name for axis in less.space.axes] == ["depth"]
    with pytest.raises(InsertError, match="no group or stage matches 'nothing'"):
        edited.without("nothing")
    with pytest.raises(
        InsertError, match=r"0\.heads: 7 is not a choice; .* to 3; heads with one key count as one"
    ):
        edited.with_choices("heads", [7])


def test_segments_follow_groups_and_the_rest_stays_whole() -> None:
    members = (Member("0", "out", WeightSlice, 2, 4, 16), Member("0", "out", WeightSlice, 1, 12, 16))
    group = Group("width", "width", 3, members, sizes={0.5: 1, 1.0: 3})
    found = Description("model", [group], overrides={"1": WeightSlice.on(in_=Segments(("width", 3)))})
    segments = Segments((None, 4), ("width*2", 6), (None, 2), ("width", 3), (None, 1))
    assert found.elastic["0"].follows == {"out": segments}
    assert Description.from_json(found.to_json()).elastic == found.elastic
    overlap = Group("other", "width", 4, (Member("0", "out", WeightSlice, 1, 3),))
    with pytest.raises(InsertError, match="overlap"):
        _ = Description("model", [group, overlap]).elastic


def test_contradictions_are_refused() -> None:
    group = description().groups["0.heads"]
    with pytest.raises(InsertError, match=r"called 0\.heads"):
        Description("model", [group, group])
    other = Group("other", "width", 12, (Member("0.0.0", "out", WeightSlice),))
    with pytest.raises(InsertError, match=r"0\.0\.0\.out follows several groups"):
        Description("model", [group, other])
    attribute = Group("other", "width", 12, (Member("0.0.0", "n", ElasticAttribute),))
    with pytest.raises(InsertError, match="several operators"):
        Description("model", [group, attribute])


def test_insert_says_what_it_takes() -> None:
    for arguments in ((description().space,), (description(),), ()):
        with pytest.raises(InsertError, match="insert_ takes"):
            subnetact.insert_(model(), *arguments)
