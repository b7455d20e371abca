"""Bundles at the hub of Hugging Face: the work of `Supernet.push_to_hub`, and a name instead of a folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from subnetact.elastic.card import model_card, validated
from subnetact.errors import extra_needed
from subnetact.files.documents import StrPath
from subnetact.supernet.supernet import Supernet

HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "revision", "token")
NEEDED = "the hub needs huggingface_hub; pip install 'subnetact[hf]'"


def downloaded(folder: StrPath, options: Mapping[str, Any]) -> StrPath:
    """Return a folder as it is, or the local copy of what has this name at the hub."""
    if os.path.isdir(folder) or str(folder).count("/") != 1:
        return folder
    with extra_needed(NEEDED):
        from huggingface_hub import snapshot_download
    return str(snapshot_download(str(folder), **options))


def push_bundle(
    supernet: Supernet, name: str, private: bool | None, token: Any, commit: Mapping[str, Any], saving: Any
) -> Any:
    """Write a bundle with its model card, and upload it as one commit; see `Supernet.push_to_hub`."""
    with extra_needed(NEEDED):
        from huggingface_hub import HfApi
    with TemporaryDirectory() as place:
        supernet.save_pretrained(place, **saving)
        Path(place, "README.md").write_text(model_card(*validated(place)), encoding="utf-8")
        api = HfApi(token=token)
        made = api.create_repo(name, private=private, exist_ok=True)
        return api.upload_folder(repo_id=made.repo_id, folder_path=place, **commit)
