"""Readers check the index of a bundle against its schema, and understand it as jsonschema does."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from fuzz.folders import change_index, change_listing, change_model, saved

from subnetact import from_pretrained
from subnetact.elastic.folder import BUNDLE
from subnetact.errors import FileFormatError
from subnetact.files.documents import checksum
from subnetact.files.schema import violation

pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")
CHANGES = (change_index, change_index, change_model, change_listing)


def test_readers_and_jsonschema_agree_on_changed_documents(tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(BUNDLE.json_schema)
    jsonschema.Draft202012Validator.check_schema(BUNDLE.json_schema)
    seen = {True: 0, False: 0}
    for number in range(400):
        source = random.Random(number)
        document = json.loads(
            (saved(source.choice(("digits", "own", "encoder"))) / "elastic.json").read_text()
        )
        assert violation(document, BUNDLE.json_schema) is None
        source.choice(CHANGES)(tmp_path, document, source)
        expected = validator.is_valid(document)
        assert (violation(document, BUNDLE.json_schema) is None) is expected, (number, document)
        seen[expected] += 1
    assert min(seen.values()) > 50


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (
            ("subnets", "small", "quality", "accuracy", "value"),
            "60",
            r"'value' of 'accuracy' of .* is '60', not number",
        ),
        (("model",), 3, "'model' of the document is 3, not object or null"),
        (("fingerprint",), "x", "not of the form"),
        (("tables", "latency-0.json"), None, "is None, not string"),
        (("engine", "removed"), [True], r"\[0\] is True, not integer"),
        (("schema",), 2, "schema 2, this version reads 1"),
    ],
)
def test_what_is_wrong_is_named(path: tuple[str, ...], value: object, said: str, tmp_path: Path) -> None:
    document = json.loads((saved("digits") / "elastic.json").read_text())
    inner = document
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    del document["checksum"]
    (tmp_path / "elastic.json").write_text(json.dumps({**document, "checksum": checksum(document)}))
    with pytest.raises(FileFormatError, match=said):
        from_pretrained(tmp_path)
