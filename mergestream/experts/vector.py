"""Task vectors Δ = θ − θ⁰: checked from the headers first, then streamed tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Literal

from mergestream.algebra.pieces import Elements, SquaredNorm, is_finite, ranges
from mergestream.base.architecture import Architecture, find_architecture
from mergestream.base.model import BaseModel, base_changed, unusable
from mergestream.base.names import layer_of
from mergestream.checkpoints import Checkpoint, torch_dtype
from mergestream.digest import TensorHasher, tensor_digest
from mergestream.engine import ResultsByTensor
from mergestream.errors import MergestreamError
from mergestream.experts.adapters.adapter import BoundAdapter
from mergestream.experts.names import NEARLY_ALL, Prefix, find_globs
from mergestream.experts.vocabulary import ROWS, FittedCheckpoint, Vocab, fit_vocabulary
from mergestream.sizes import shorten_list

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from mergestream.algebra.lowrank import LowRank

TensorAction = Literal["merged", "copied", "head", "tokens", "tied", "unchanged", "ignored"]
"""What happens to a tensor: ``unchanged`` ones are missing in the expert, ``tokens`` are rows that only it has."""
MAX_GLOBS = 6
"""Most globs that an error suggests"""


class BasePieces:
    """The pieces of a base tensor in the state's dtype, digested as they are read; the last one is kept."""

    def __init__(self, tensor: Tensor, dtype: torch.dtype) -> None:
        self._hasher = TensorHasher(tensor.dtype, tensor.shape)
        self._flat = tensor.reshape(-1)
        self._dtype = dtype
        self._start = -1

    def at(self, start: int, stop: int) -> Tensor:
        """The elements from ``start`` to ``stop``."""
        if start != self._start:
            stored = self._flat[start:stop]
            self._hasher.update(stored)
            self._start, self._piece = start, stored.to(self._dtype)
        return self._piece

    def digest(self) -> str:
        """Digest of the whole tensor, after all pieces were read in order."""
        return self._hasher.hexdigest()


class TaskVector:
    """The difference of one expert from the base, tensor by tensor."""

    def __init__(
        self,
        model: BaseModel,
        base: Checkpoint,
        expert: Checkpoint,
        *,
        partial: bool = False,
        ignore: Sequence[str] = (),
        prefix: Prefix | None = None,
        vocab: Vocab | None = None,
    ) -> None:
        """``expert`` has the base's names; ``prefix`` is how its own differ."""
        self.model = model
        self.base = base
        self.adapter = expert if isinstance(expert, BoundAdapter) else None
        in_factors = self.adapter.terms if self.adapter else ()
        self.expert, self.tokens, notes = fit_vocabulary(model, base, expert, vocab, (*ignore, *in_factors))
        self.notes = ((f"{expert.source}: {prefix}",) if prefix else ()) + notes
        """Sentences for the user"""
        self.prefix = prefix or Prefix()
        if self.adapter:
            self.prefix, self.notes = self.adapter.prefix, self.adapter.notes + self.notes
        missing = [name for name in model.merged if name not in self.expert.tensors]
        lacks_some = 0 < len(missing) < len(model.merged)
        architecture = find_architecture(self.expert) if lacks_some else Architecture()
        self.absent = [name for name in missing if architecture.slots and not architecture.slot_of(name)]
        """Tensors of the base that the expert's class does not have"""
        if self.absent:
            unchanged = f"{_list_tensors(self.absent)} of the base stay unchanged, because {architecture.name} has none"
            self.notes += (f"{expert.source}: {unchanged}",)
        self.actions = plan_tensors(model, self.expert, partial=partial, ignore=ignore, absent=self.absent)
        self.names = model.merged
        self.heads = tuple(name for name in self.expert.tensors if self.actions.get(name) in ("head", "tokens"))
        """The tensors that stay with the expert"""
        self.digests = ResultsByTensor[str]()
        """Digests of the expert's tensors that were read to the end"""
        self.norm2 = ResultsByTensor[float]()
        """‖Δ‖² of these tensors"""

    @property
    def copies(self) -> int:
        """Copies of a tensor of base and expert in memory while it is read."""
        return self.base.copies + self.expert.copies

    def rank(self, name: str) -> int | None:
        """An upper bound of the rank of Δ if it is given in factors; None if it is dense."""
        if self.adapter and self.actions[name] != "merged":
            return 0
        terms = self.adapter.terms.get(name) if self.adapter else None
        return sum(term.rank for term in terms) if terms else None

    def factors(self, name: str) -> LowRank:
        """Δ in factors, if ``rank`` is not None."""
        from mergestream.algebra.lowrank import LowRank, squared_norm

        assert self.adapter is not None
        tensor = self.model.tensors[name]
        delta = LowRank.zeros(tensor.shape, torch_dtype(tensor.state_dtype))
        if self.actions[name] == "merged":
            self.adapter.check_copy(name, self.base)
            self.digests[name] = self.adapter.digest(name)
            delta = self.adapter.delta(name, delta.dtype)
        self.norm2[name] = squared_norm(delta)
        return delta

    def elements(self, name: str, base: Elements | None = None) -> Elements:
        """A function that returns any range of Δ in new memory, neither checked nor digested.

        Several task vectors may share ``base``, which is made by `base_elements`.
        """
        import torch

        if self.actions[name] != "merged":
            dtype = torch_dtype(self.model.tensors[name].state_dtype)
            return lambda start, stop: torch.zeros(stop - start, dtype=dtype)
        if self.rank(name) is not None:
            return self.factors(name).elements()
        base, expert = base or self.base_elements(name), self.expert.read(name).reshape(-1)
        return lambda start, stop: _subtract(expert[start:stop], base(start, stop))

    def base_elements(self, name: str) -> Elements:
        """A function that returns any range of the base in the state's dtype; the last range is kept."""
        flat = cache(lambda: self.base.read(name).reshape(-1))
        dtype = torch_dtype(self.model.tensors[name].state_dtype)
        return lru_cache(maxsize=1)(lambda start, stop: flat()[start:stop].to(dtype))

    def base_pieces(self, name: str) -> BasePieces:
        """The pieces of the base, to be shared by several task vectors."""
        return BasePieces(self.base.read(name), torch_dtype(self.model.tensors[name].state_dtype))

    def pieces(self, name: str, base: BasePieces | None = None) -> Iterator[tuple[int, Tensor]]:
        """All of Δ in order, as pairs of first element and piece; digests are verified, NaN and Inf are refused.

        Several task vectors that are read in step may share ``base``.
        """
        tensor, norm = self.model.tensors[name], SquaredNorm()
        if self.actions[name] != "merged" or self.rank(name) is not None:
            self.norm2[name] = 0.0
            elements = self.elements(name)
            yield from ((start, elements(start, stop)) for start, stop in ranges(tensor.numel))
            return
        base, expert = base or self.base_pieces(name), self.expert.read(name)
        hasher = TensorHasher(expert.dtype, expert.shape)
        expert = expert.reshape(-1)
        for start, stop in ranges(tensor.numel):
            piece = expert[start:stop]
            hasher.update(piece)
            delta = _subtract(piece, base.at(start, stop))
            norm.add(delta)
            if not norm.finite:
                raise self._unusable(name)
            yield start, delta
        if tensor.digest and base.digest() != tensor.digest:
            raise base_changed(name, self.base)
        self.digests[name] = hasher.hexdigest()
        self._check_ties(name)
        self.norm2[name] = norm.total()
        if not math.isfinite(self.norm2[name]):
            raise self._unusable(name)

    def whole(self, name: str) -> Tensor:
        """Δ in one piece, with the tensor's shape."""
        import torch

        tensor = self.model.tensors[name]
        delta = torch.empty(tensor.shape, dtype=torch_dtype(tensor.state_dtype))
        flat = delta.view(-1)
        for start, piece in self.pieces(name):
            flat[start : start + piece.numel()] = piece
        return delta

    def head(self, name: str) -> Tensor:
        """Read a tensor that stays with the expert."""
        tensor = self.expert.read(name)
        if not is_finite(tensor):
            raise unusable(name, self.expert)
        self.digests[name] = tensor_digest(tensor)
        return tensor

    def _check_ties(self, name: str) -> None:
        """Refuse an expert that stores different values for tensors that are tied in the base."""
        for alias in self.expert.tensors.keys() & self.model.ties.keys():
            is_tied = self.model.ties[alias] == name and self.actions[alias] == "tied"
            if is_tied and tensor_digest(self.expert.read(alias)) != self.digests[name]:
                raise MergestreamError(
                    f"{self.expert.source} has different values for {name} and {alias}, which are tied in the base; "
                    f"tie them again, or leave one out with --ignore {alias}"
                )

    def _unusable(self, name: str) -> MergestreamError:
        bad_base = self.base.has_weights and not is_finite(self.base.read(name))
        return unusable(name, self.base if bad_base else self.expert)


def _subtract(expert: Tensor, base: Tensor) -> Tensor:
    """θ − θ⁰ in the dtype of θ⁰; in place if θ was copied to convert it."""
    converted = expert.to(base.dtype)
    return converted - base if converted is expert else converted.sub_(base)


# --- checking the headers -----------------------------------------------------------------------------------


def plan_tensors(
    model: BaseModel, expert: Checkpoint, *, partial: bool, ignore: Sequence[str], absent: Sequence[str] = ()
) -> dict[str, TensorAction]:
    """Decide what happens to every tensor of base and expert; an error says what does not fit."""
    ignored, ties = _match_ignored(model, expert, ignore), model.ties
    actions: dict[str, TensorAction] = {}
    missing, extra = [], []
    for name, tensor in model.tensors.items():
        if name in ignored:
            actions[name] = "ignored"
        elif tensor.role in ("tied", "copied", "head"):
            actions[name] = tensor.role
        elif name in expert.tensors:
            actions[name] = "merged"
        elif partial or name in absent:
            actions[name] = "unchanged"
        else:
            missing.append(name)
    for name in expert.tensors:
        if name in actions:
            continue
        if name in ignored:
            actions[name] = "ignored"
        elif name.startswith(ROWS) and isinstance(expert, FittedCheckpoint):
            actions[name] = "tokens"
        elif model.is_head(name):
            actions[name] = "head"
        elif name in ties:
            actions[name] = "tied"
        else:
            extra.append(name)
    if missing:
        hint = ""
        if len(missing) <= (1 - NEARLY_ALL) * len(model.merged):
            hint = f"; {_suggest_heads([*missing, *extra], actions, 'when the store is made')}"
        raise MergestreamError(
            f"{expert.source} lacks {_list_tensors(missing)} of the base; to leave them unchanged, pass --partial{hint}"
        )
    if extra:
        raise MergestreamError(
            f"{expert.source} has {_list_tensors(extra)} that the base does not have; "
            f"{_suggest_heads(extra, actions)}, {_suggest_option('--ignore', extra, actions)} leaves it out"
        )
    for name, action in actions.items():
        if action in ("merged", "tied") and name in expert.tensors:
            _check_spec(model, expert, name, ties.get(name, name))
    return actions


def _match_ignored(model: BaseModel, expert: Checkpoint, ignore: Sequence[str]) -> set[str]:
    names = model.tensors.keys() | expert.tensors.keys()
    ignored: set[str] = set()
    for glob in ignore:
        matching = {name for name in names if fnmatchcase(name, glob) or fnmatchcase(expert.stored_name(name), glob)}
        if not matching:
            raise MergestreamError(
                f"--ignore {glob} matches no tensor of {expert.source} or its base: check the spelling"
            )
        ignored |= matching
    return ignored


def _check_spec(model: BaseModel, expert: Checkpoint, name: str, canonical: str) -> None:
    """Refuse another shape than the base's, and integers."""
    ours, theirs = model.tensors[canonical], expert.tensors[name]
    where = expert.place(name)
    if theirs.shape != ours.shape:
        hint = ""
        if theirs.shape[1:] == ours.shape[1:]:
            others = [other for other in model.tensors if layer_of(other) != layer_of(name)]
            hint = f"{_suggest_heads([name], others, 'when the store is made')}; else "
        raise MergestreamError(
            f"{where} has shape {list(theirs.shape)}, the base has {list(ours.shape)}; {hint}resize it to the base's "
            f"shape, or leave it out with --ignore {name}"
        )
    if not theirs.is_float:
        raise MergestreamError(
            f"{where} is {theirs.dtype}, the base has {ours.dtype}; convert it to a floating-point type first"
        )


def _suggest_heads(names: Sequence[str], others: Collection[str], where: str = "in a store") -> str:
    return f"{_suggest_option('--heads', names, others)} {where} keeps a head with its expert"


def _suggest_option(option: str, names: Sequence[str], others: Collection[str]) -> str:
    """The option to type for these tensors; with GLOB in place of a long list."""
    globs = find_globs(names, others)
    return " ".join(f"{option} '{glob}'" for glob in globs) if len(globs) <= MAX_GLOBS else f"{option} GLOB"


def _list_tensors(names: Sequence[str]) -> str:
    return f"tensor {names[0]}" if len(names) == 1 else f"{len(names)} tensors ({shorten_list(names)})"
