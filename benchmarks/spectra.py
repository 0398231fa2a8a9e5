"""Statistics of a suite's experts: norms, effective ranks, and shared directions.

    python -m benchmarks.spectra language:8 language-tiny:8 text:8 -o docs/results/language

Means over the linear weights of the model (and over experts, or pairs of experts). Writes DIR/spectra.json and .md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor

from benchmarks.suites.experts import ExpertSuite
from mergestream.escaping import markdown_table as table
from mergestream.evaluation.suites import open_suite
from mergestream.files import write_json, write_text

LEADING = 16
"""Number of leading directions: the rank of the adapters"""


@dataclass(frozen=True)
class Spectra:
    norm: float
    """‖Δ‖ / ‖W‖: relative size of the task vector"""
    stable_rank: float
    """‖Δ‖² / σ₁²: stable rank"""
    leading_energy: float
    """Share of ‖Δ‖² in the leading directions"""
    cosine: float
    """Absolute cosine of two experts' Δ"""
    inputs: float
    """‖V_iᵀV_j‖² / k of two experts' leading input directions; 1 if they are the same"""
    outputs: float
    """The same for output directions"""
    chance: float
    """Expected `inputs` for random directions"""


NAMES = {
    "norm": "‖Δ‖/‖W‖",
    "stable_rank": "stable rank",
    "leading_energy": f"energy in {LEADING} directions, %",
    "cosine": "cosine of two, in magnitude",
    "inputs": "inputs shared, %",
    "outputs": "outputs shared, %",
    "chance": "by chance, %",
}


def of_suite(suite: ExpertSuite) -> Spectra:
    weights = linear_weights(suite.load(suite.base()))
    experts = [linear_weights(suite.load(suite.expert(task))) for task in suite.tasks]
    found = [of_weight(weight, [expert[name] - weight for expert in experts]) for name, weight in weights.items()]
    moved = [one for one in found if one is not None]
    return Spectra(**{name: mean(getattr(one, name) for one in moved) for name in NAMES})


def linear_weights(model: torch.nn.Module) -> Mapping[str, Tensor]:
    """Return the linear weights except the head."""
    return {
        name: module.weight.detach()
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and not name.endswith("lm_head")
    }


def of_weight(weight: Tensor, vectors: list[Tensor]) -> Spectra | None:
    """Return None if an expert leaves the weight unchanged."""
    if not all(vector.any() for vector in vectors):
        return None
    parts = [torch.linalg.svd(vector, full_matrices=False) for vector in vectors]
    energies = [part.S.square() for part in parts]
    pairs = list(combinations(range(len(vectors)), 2))
    return Spectra(
        norm=mean(float(vector.norm() / weight.norm()) for vector in vectors),
        stable_rank=mean(float(energy.sum() / energy[0]) for energy in energies),
        leading_energy=mean(float(energy[:LEADING].sum() / energy.sum()) for energy in energies),
        cosine=mean(cosine(*(vectors[i] for i in pair)) for pair in pairs),
        inputs=mean(shared(*(parts[i].Vh[:LEADING].mT for i in pair)) for pair in pairs),
        outputs=mean(shared(*(parts[i].U[:, :LEADING] for i in pair)) for pair in pairs),
        chance=LEADING / weight.shape[1],
    )


def cosine(one: Tensor, other: Tensor) -> float:
    return abs(float((one * other).sum() / (one.norm() * other.norm())))


def shared(one: Tensor, other: Tensor) -> float:
    """Return the overlap of two orthonormal bases of equal size."""
    return float((one.mT @ other).square().sum() / one.shape[1])


def lines(found: Mapping[str, Spectra]) -> Iterator[list[str]]:
    for name, title in NAMES.items():
        form = "{:.1%}" if title.endswith("%") else "{:.3f}"
        yield [title, *(form.format(getattr(one, name)).rstrip("%") for one in found.values())]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="+", metavar="SUITE:TASKS")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    found = {}
    for name in options.suites:
        of, _, tasks = name.partition(":")
        suite = open_suite(of, tasks=int(tasks))
        assert isinstance(suite, ExpertSuite)
        found[f"{of} {tasks}"] = of_suite(suite)
        print(f"{name} is measured", file=sys.stderr)
    write_json(options.output / "spectra.json", {name: asdict(one) for name, one in found.items()})
    text = "\n".join(table(["", *found], lines(found))) + "\n"
    write_text(options.output / "spectra.md", text)
    print(text)


if __name__ == "__main__":
    main()
