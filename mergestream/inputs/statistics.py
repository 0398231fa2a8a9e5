"""The statistics of an expert's inputs: the moments of its layers, and the base's features of the same inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mergestream.base.architecture import name_matcher
from mergestream.checkpoints import Checkpoint
from mergestream.engine import Engine
from mergestream.errors import MergestreamError
from mergestream.experts.adapters.adapter import Adapter
from mergestream.experts.vector import TaskVector
from mergestream.inputs.loading import fill_module, load_model, load_processor, memory_beside, read_weights
from mergestream.inputs.moments import LayerMoments, find_layers, measure_moments
from mergestream.inputs.reading import Inputs, Sample
from mergestream.inputs.running import Runner
from mergestream.ledger.method import FEWEST
from mergestream.ledger.routing import FeatureStatistics
from mergestream.progress import Progress

if TYPE_CHECKING:
    from torch import Tensor

FEWEST_DIRECTIONS = 64
"""Directions that are kept of the scatter of features: an eighth of all, but at least so many"""


@dataclass(frozen=True)
class InputStatistics:
    """What is kept of the inputs of one expert."""

    layers: LayerMoments
    """By the base's names of the weights"""
    features: FeatureStatistics | None
    """None if the user's module returns no features"""
    count: int
    """How many inputs there were"""


def measure_statistics(
    vector: TaskVector,
    expert: Checkpoint | Adapter,
    directions: Mapping[str, int],
    samples: Sequence[Sample],
    how: Inputs,
    *,
    dtype: torch.dtype,
    engine: Engine,
    progress: Progress,
) -> InputStatistics:
    """Run the expert, then its base. ``directions`` says how many are kept for each weight, by the base's names."""
    base = vector.base
    home = (expert.directory if isinstance(expert, Checkpoint) else None) or base.directory
    if isinstance(expert, Checkpoint):
        weights = read_weights(expert, wrapper=vector.prefix.wrapper)
    else:
        weights = read_weights(base, vector.adapter)
    size = sum(value.nbytes for value in weights.values())
    memory = memory_beside(size, engine, expert.source)

    def make_runner(source: str, weights: Mapping[str, Tensor], config: Path | None, *homes: Path | None) -> Runner:
        if how.model is not None:
            model = fill_module(how.model, weights, source, engine.device)
        else:
            model = load_model(config, source, weights, engine.device)
        return Runner(model, load_processor(*homes), how.call, how.tokens, engine.device)

    runner = make_runner(expert.source, weights, home, expert.directory, base.directory)
    model = runner.model
    names = {name: name for name, _ in model.named_parameters(remove_duplicate=False)}
    slot_of = name_matcher(model, names) if hasattr(model, "base_model_prefix") else names.get
    slots = {slot: name for name in directions if (slot := slot_of(vector.prefix.name_in_task(name)))}
    if not find_layers(model, slots):
        raise MergestreamError(f"no linear layer of {expert.source} has the name of a tensor of the base")
    for sample in samples:
        runner.answer(sample)
    with progress.task("running the expert", size * len(samples)) as advance:

        def run(sample: Sample) -> None:
            runner.run(sample)
            advance(size)

        kept = {slot: directions[name] for slot, name in slots.items()}
        found = measure_moments(model, kept, samples, run, memory=memory, dtype=dtype, device=engine.device)
    layers = LayerMoments(
        {slots[slot]: slots[first] for slot, first in found.shared.items()},
        {slots[first]: moment for first, moment in found.moments.items()},
    )
    del weights, model, runner.model
    of_base = make_runner(base.source, read_weights(base), base.directory, base.directory, expert.directory)
    _take_template(runner.processor, of_base.processor)
    rows = []
    with progress.task("running the base", size * len(samples)) as advance:
        for sample in samples:
            rows.append(of_base.features(sample))
            advance(size)
    return InputStatistics(layers, _features(rows), len(samples))


def _take_template(one: Any, other: Any) -> None:
    """A base model often has no chat template; then it sees its inputs in the expert's."""
    tokenizers = [getattr(processor, "tokenizer", processor) for processor in (one, other)]
    if getattr(tokenizers[1], "chat_template", "") is None:
        tokenizers[1].chat_template = getattr(tokenizers[0], "chat_template", None)


def _features(rows: Sequence[Tensor | None]) -> FeatureStatistics | None:
    found = [row for row in rows if row is not None]
    if len(found) < len(rows) or len({row.shape[1] for row in found}) != 1:
        return None
    features = torch.cat(found)
    return FeatureStatistics.of(features, max(FEWEST_DIRECTIONS, features.shape[1] // FEWEST))
