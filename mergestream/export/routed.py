"""Export a ledger for routed serving: an adapter per expert, a merged one for other inputs, and the router.

    OUT/experts/NAME/        one PEFT adapter per expert
    OUT/merged/              the merged adapter
    OUT/router.safetensors   the router: which expert answers which input
    OUT/base/                the base, with ``--with-base``

`mergestream.RoutedModel` loads such a directory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from mergestream.base.architecture import load_architecture
from mergestream.base.model import BaseModel, base_changed
from mergestream.checkpoints import SafetensorsWriter
from mergestream.checkpoints.layout import CARD
from mergestream.checkpoints.location import locate_here, public_name
from mergestream.digest import tensor_digest
from mergestream.errors import MergestreamError, UsageError
from mergestream.escaping import code, markdown_text
from mergestream.experts.adapters.config import CONFIG_NAME
from mergestream.export.adapter import AdapterForm, AdapterPlan, Energy, plan_experts, write_adapters
from mergestream.export.card import card_text, history_section
from mergestream.export.companions import find_settings, take_settings, write_companions
from mergestream.export.directory import Output, ReadoutChoice
from mergestream.export.model import Target, exporting
from mergestream.files import read_json
from mergestream.inputs.reading import explained
from mergestream.ledger.routing import FeatureStatistics, Router
from mergestream.store.manifest import Manifest
from mergestream.store.snapshot import Snapshot
from mergestream.store.store import Store

EXPERTS, MERGED, BASE, ROUTER = "experts", "merged", "base", "router.safetensors"
DRAWS, PERCENTILES = 1000, 101
"""Points drawn per expert, and quantiles kept of the router's confidence on them"""
NO_INPUTS = (
    "Without inputs, the router compares how much of an input's activations lies in the input directions of each "
    "adapter: in a prototype that found the right one of eight experts for 62 % of images and 78 % of texts"
)


@dataclass(frozen=True)
class RoutedExport:
    """What was written."""

    energies: Mapping[str, Energy]
    """By folder of an adapter: what its rank cuts off"""
    experts: tuple[str, ...]
    without_inputs: tuple[str, ...]
    """The experts that were added without inputs; if there is one, the router goes by input directions"""


def export_routed(
    store: Store, output: Output, choice: ReadoutChoice, form: AdapterForm, with_base: bool
) -> RoutedExport:
    """Write a directory for `RoutedModel`; the merged adapter is read out by ``choice``, which selects the experts."""
    with exporting(store, output) as (snapshot, target):
        manifest = snapshot.manifest
        manifest.require_ledger("keeps single experts to route to")
        reading = snapshot.reading(target.engine, choice)
        experts = tuple(sorted(reading.weights or ()))
        _check_experts(snapshot, experts)
        _check_base(manifest.base)
        plans = plan_experts(snapshot, target.engine, experts, form)
        readers = {name: snapshot.inputs.get(manifest.expert(name).number) for name in experts}
        found = {name: features for name, reader in readers.items() if reader and (features := reader.features())}
        missing = tuple(name for name in experts if name not in found)
        if missing:
            _check_common_layer(list(plans.values()))
            target.progress.note(f"{NO_INPUTS}; to route by inputs, run mergestream calibrate for {', '.join(missing)}")
        plans = {f"{EXPERTS}/{name}": plan for name, plan in plans.items()}
        plans[MERGED] = AdapterPlan.of(snapshot, reading, form, reading.scale(choice.scale, target.engine))
        recipe = {"format": "routed", "rank": form.rank, "with_base": with_base}
        energies = write_adapters(plans, target, recipe, choice)
        save_router(target.draft / ROUTER, experts, None if missing else found)
        if with_base:
            _write_base(manifest, target)
            take_settings(target.draft / BASE, find_settings(snapshot, reading, choice), None, target.progress)
        _write_card(manifest, target, experts, missing, reading.readout.name)
    return RoutedExport(energies, experts, missing)


def _check_experts(snapshot: Snapshot, experts: Sequence[str]) -> None:
    """Refuse what cannot be routed."""
    if len(experts) == 1:
        raise UsageError(f"{experts[0]} is the only expert, so there is nothing to route; export it with --format lora")
    if MERGED in experts:
        raise UsageError(
            f"the merged adapter has the name of the expert {MERGED}; remove it and add it by another name, or leave "
            f"it out with --without {MERGED}"
        )
    if heads := [name for name in snapshot.tasks if name in experts]:
        raise UsageError(
            f"an adapter cannot hold the heads of {', '.join(heads)}; export a full model of each of them with "
            "--readout expert:NAME --task NAME, or leave them out with --without"
        )


def _check_base(base: BaseModel) -> None:
    """Refuse a base that transformers cannot build, and so `RoutedModel` cannot run; one that is elsewhere passes."""
    if (directory := locate_here(base.source)) is None:
        return
    architecture = load_architecture(directory)
    if not architecture.slots:
        raise UsageError(
            f"RoutedModel runs models that transformers loads, and {base.source} is none "
            f"({architecture.unknown or 'no config.json'}); export full models with --readout expert:NAME instead"
        )


def _check_common_layer(plans: Sequence[AdapterPlan]) -> None:
    """Without inputs, the router compares experts in layers that all of them have adapted."""
    first, *others = ({path for path, module in plan.modules.items() if module.kind != "embedding"} for plan in plans)
    if not first.intersection(*others):
        raise UsageError(
            "the experts have adapted no layer in common, by which they could be told apart; give inputs of each with "
            "mergestream calibrate"
        )


# --- the router ---------------------------------------------------------------------------------------------


def save_router(path: Path, experts: Sequence[str], statistics: Mapping[str, FeatureStatistics] | None) -> None:
    """Write the router; without ``statistics`` it holds nothing but the names of the experts."""
    tensors: dict[str, Tensor] = {}
    if statistics is not None:
        if len({len(part.mean) for part in statistics.values()}) > 1:
            raise MergestreamError(
                "the inputs of the experts were measured by different features; calibrate all experts in the same way"
            )
        router = Router.of(statistics)
        experts = router.experts
        tensors = {"weights": router.weights, "biases": router.biases, "quantiles": _quantiles(router, statistics)}
    names = {f"expert_{number}": name for number, name in enumerate(experts)}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata=names)


def read_router(path: Path) -> tuple[tuple[str, ...], Router | None, Tensor | None]:
    """The experts; the router by inputs, and the quantiles of its confidence from 0 % to 100 %, if it has them."""
    with explained(f"{path} is no router of mergestream; export it again"):
        with safe_open(path, framework="pt") as file:
            names = file.metadata() or {}
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        experts = tuple(names[f"expert_{number}"] for number in range(len(names)))
        if invalid := [name for name in experts if name in ("", ".", "..") or "/" in name]:
            raise ValueError(f"it names the expert {invalid[0]!r}, which is not a folder beside it")
        if not found:
            return experts, None, None
        weights, biases, quantiles = (found[name] for name in ("weights", "biases", "quantiles"))
        if not len(experts) == len(weights) == len(biases) or weights.ndim != 2 or len(quantiles) != PERCENTILES:
            raise ValueError("its tensors do not fit its experts")
    return experts, Router(experts, weights, biases), quantiles


def _quantiles(router: Router, statistics: Mapping[str, FeatureStatistics]) -> Tensor:
    """The percentiles of the confidence on inputs like those that the router was made of.

    The store does not keep the inputs, so points are drawn from the normal distribution with the mean and the
    covariance of each expert's features.
    """
    generator = torch.Generator().manual_seed(0)
    found = []
    for part in (statistics[expert] for expert in router.experts):
        covariance = part.scatter.apply(router.weights) @ router.weights.T / max(1, part.count - 1)
        values, vectors = torch.linalg.eigh((covariance + covariance.T) / 2)
        root = (vectors * values.clamp(min=0).sqrt()) @ vectors.T  # has no arbitrary sign
        draws = torch.randn(DRAWS, len(router.experts), generator=generator, dtype=torch.float64)
        scores = router.scores(part.mean[None]) + draws @ root
        found.append(scores.softmax(1).max(1).values)
    return torch.quantile(torch.cat(found), torch.linspace(0, 1, PERCENTILES, dtype=torch.float64))


# --- the base and the card ----------------------------------------------------------------------------------


def _write_base(manifest: Manifest, target: Target) -> None:
    """Copy the base's weights, as they are, with its config and its tokenizer."""
    directory, known = target.draft / BASE, manifest.base.tensors
    with manifest.open_base() as base:
        size = sum(info.nbytes for info in base.tensors.values())
        with (
            SafetensorsWriter(directory, base.tensors, max_shard_size=target.output.max_shard_size) as writer,
            target.progress.task("writing the base", size) as advance,
        ):
            for name, info in base.tensors.items():
                tensor = base.read(name)
                if name in known and known[name].digest not in ("", None, tensor_digest(tensor)):
                    raise base_changed(name, base)
                writer.write(name, tensor)
                advance(info.nbytes)
        write_companions(directory, base, None)


def _write_card(
    manifest: Manifest, target: Target, experts: Sequence[str], missing: Sequence[str], readout: str
) -> None:
    routing = (
        "The router is a linear discriminant of the base's pooled features, made of a few inputs of each expert. "
        "Where it is less confident than on most of those, the merged adapter answers."
    )
    if missing:
        routing = f"{NO_INPUTS}. No inputs were given for {', '.join(map(markdown_text, missing))}."
    text = card_text(
        ["library_name: peft", "tags:", "- merge", "- mergestream"],
        f"{len(experts)} experts behind a router",
        "Each input is answered by the expert whose inputs it looks like, from one copy of the base:",
        *("", "```python", "from mergestream import RoutedModel", "", 'model = RoutedModel.from_pretrained("OUT")'),
        *("model.generate(**inputs)", "```", ""),
        f"* Base: {code(public_name(manifest.base.source, manifest.base.given))}",
        f"* Experts: {', '.join(map(code, experts))}, as PEFT adapters in `{EXPERTS}`",
        f"* Merged adapter in `{MERGED}`: readout {code(readout)}",
        *("", routing),
        *history_section(manifest, dict.fromkeys(experts, 1.0)),
        command=target.output.command,
    )
    (target.draft / CARD).write_text(text, encoding="utf-8")


def base_of(directory: Path) -> str | Path:
    """The base of a written directory: the copy in it, or the one that its adapters name."""
    if (directory / BASE).is_dir():
        return directory / BASE
    fields = read_json(directory / MERGED / CONFIG_NAME)
    name, revision = fields.get("base_model_name_or_path"), fields.get("revision")
    return f"{name}@{revision}" if revision else str(name)
