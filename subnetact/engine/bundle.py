"""What an engine adds to a bundle: its subnets in the order of their ids, its example, and how it serves."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from subnetact.elastic.folder import ACCURACY, INDEX, load_folder, save_folder
from subnetact.engine.config import EngineConfig
from subnetact.errors import NotCalibrated
from subnetact.files.documents import StrPath
from subnetact.latency.table import LatencyTable
from subnetact.space import SubnetSpace
from subnetact.supernet.norm_table import NormTable
from subnetact.supernet.statistics import batch_norms
from subnetact.supernet.supernet import Supernet


def save_bundle(
    supernet: Supernet,
    config: EngineConfig,
    tables: Mapping[str, LatencyTable],
    directory: StrPath,
    fingerprints: Collection[str],
) -> None:
    """Write a bundle of an engine; its accuracies are in percent. `fingerprints` are for `save_folder`."""
    card, facts = supernet.card.with_names(dict.fromkeys(config.specs, "subnet")), config.to_json()
    names = list(card.names_of(config.specs))
    quality = {name: dict(figures) for name, figures in card.quality.items()}
    for name, percent in zip(names, facts.pop(ACCURACY), strict=True):
        former = quality.get(name, {}).get(ACCURACY, {"value": None, "source": None})
        if percent is not None and percent != former["value"]:
            quality.setdefault(name, {})[ACCURACY] = {"value": percent, "source": None}
    card = replace(card, quality=quality)
    require = () if config.allow_uncalibrated else config.served
    save_folder(supernet, directory, card, tables, facts | {"subnets": names}, require, fingerprints)


def load_bundle(
    directory: StrPath, model: nn.Module | None, mapped: bool, options: Mapping[str, Any]
) -> tuple[Supernet, EngineConfig, dict[str, LatencyTable], str]:
    """Read a bundle and its fingerprint; a model that is given stays as it was if that fails."""

    def config_of(
        document: dict[str, Any], space: SubnetSpace, norms: NormTable, supernet: Supernet
    ) -> tuple[EngineConfig, str]:
        card = document["card"]
        facts = document["engine"] or EngineConfig(()).to_json()
        names = facts["subnets"] or list({spec: name for name, spec in card.subnets.items()}.values())
        percent = [card.quality.get(name, {}).get(ACCURACY, {}).get("value") for name in names]
        specs = [card.subnets[name].to_json() for name in names]
        stored = EngineConfig.from_json({**facts, "subnets": specs, ACCURACY: percent}, space)
        config = replace(stored, **options)
        bare = [spec for spec in config.served if spec not in norms]
        if bare and not config.allow_uncalibrated and batch_norms(supernet.network):
            raise NotCalibrated(
                f"{directory}/{INDEX}: the bundle has no BatchNorm statistics of {bare[0]}; "
                "allow_uncalibrated=True uses the shared ones"
            )
        return config, document["fingerprint"]

    supernet, tables, (config, fingerprint) = load_folder(directory, model, mapped, True, config_of)
    return supernet, config, tables, fingerprint
