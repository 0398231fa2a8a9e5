"""Compare our results with other tools' and with the formula in float64."""

from __future__ import annotations

import math
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.checkpoints import Family
from mergestream import OPCM
from mergestream.algebra.lowrank import dense
from mergestream.checkpoints import Checkpoint, open_checkpoint
from mergestream.methods.base import Context

NOT_MERGED_BY_FUSIONBENCH = "class_embedding"
"""FusionBench skips it, because its module is not a leaf"""


def with_fusionbench(family: Family, ours: Path, our_lambda: float, theirs: Path, their_lambda: float) -> float:
    """Return ‖S_ours − S_theirs‖ / ‖S_theirs‖, S = λ·(merged − base), over the tensors that FusionBench merges."""
    difference, norm = 0.0, 0.0
    with open_checkpoint(family.base) as base, open_checkpoint(ours) as a, open_checkpoint(theirs) as b:
        for name in base.tensors:
            if not name.endswith(NOT_MERGED_BY_FUSIONBENCH):
                reference = _task_vector(b, base, name) * their_lambda
                difference += float((_task_vector(a, base, name) * our_lambda - reference).square().sum())
                norm += float(reference.square().sum())
    return math.sqrt(difference / norm)


def with_mergekit(family: Family, ours: Path, theirs: Path, density: float) -> tuple[float, int]:
    """‖merged_ours − merged_theirs‖ / ‖merged_theirs − base‖ without ties, and in how many ties they differ.

    A tie is an entry of a task vector that equals the least magnitude that is kept: of several such entries
    mergekit's sort keeps an arbitrary few, to have the count exact; we keep them all.
    """
    difference, norm, ties = 0.0, 0.0, 0
    with ExitStack() as stack:
        base, a, b, *experts = (
            stack.enter_context(open_checkpoint(path)) for path in (family.base, ours, theirs, *family.experts)
        )
        for name in base.tensors:
            reference = _task_vector(b, base, name)
            distance = (_task_vector(a, base, name) - reference).square()
            tied = sum(_at_threshold(expert.read(name) - base.read(name), density) for expert in experts) > 0
            ties += int((distance[tied] > 1e-6 * reference[tied].square()).sum())
            difference += float(distance[~tied].sum())
            norm += float(reference.square().sum())
    return math.sqrt(difference / norm), ties


def _at_threshold(delta: Tensor, density: float) -> Tensor:
    magnitude = delta.abs()
    kept = max(1, int(density * delta.numel()))
    return magnitude == magnitude.flatten().kthvalue(delta.numel() - kept + 1).values


def with_float64_svd(family: Family, layer: str) -> dict[str, float]:
    """‖P(Δ) − exact‖ / ‖exact‖ for every matrix of one layer: our kernel against a full SVD in float64."""
    errors = {}
    with (
        open_checkpoint(family.base) as base,
        open_checkpoint(family.experts[0]) as first,
        open_checkpoint(family.experts[1]) as second,
    ):
        for name, info in base.tensors.items():
            if layer in name and len(info.shape) == 2:
                S, delta = first.read(name) - base.read(name), second.read(name) - base.read(name)
                kept = OPCM(alpha=0.5).absorb({"sum": S}, delta, Context(2, linear=True)).kept
                ours = delta if kept is None else dense(kept)
                exact = reference_projection(S.double(), delta.double(), alpha=0.5)
                errors[name] = float((ours - exact).norm() / exact.norm())
    return errors


def reference_projection(S: Tensor, delta: Tensor, alpha: float) -> Tensor:
    """Apply the formula literally: Δ in the full bases of S, diagonal and leading q×q block set to zero."""
    u, s, vh = torch.linalg.svd(S, full_matrices=True)
    q = int((s.cumsum(0) < alpha * s.sum()).sum())
    core = u.T @ delta @ vh.T
    core.diagonal().zero_()
    core[:q, :q] = 0
    projected: Tensor = u @ core @ vh
    return projected


def _task_vector(checkpoint: Checkpoint, base: Checkpoint, name: str) -> Tensor:
    return checkpoint.read(name).double() - base.read(name).double()
