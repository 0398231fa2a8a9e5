"""Task vectors Δ = θ − θ⁰: checked from the headers first, then streamed tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Literal

from mergestream.algebra.pieces import Elements, SquaredNorm, is_finite, ranges
from mergestream.base.model import BaseModel, base_changed, unusable
from mergestream.base.names import layer_of
from mergestream.checkpoints import Checkpoint, torch_dtype
from mergestream.digest import TensorHasher, tensor_digest
from mergestream.engine import ResultsByTensor
from mergestream.errors import MergestreamError
from mergestream.experts.names import NEARLY_ALL, Prefix, globs_of
from mergestream.experts.vocabulary import ROWS, FittedCheckpoint, Vocab, fit
from mergestream.sizes import shorten_list

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from mergestream.algebra.lowrank import LowRank
    from mergestream.experts.adapters.config import AdapterConfig

TensorAction = Literal["merged", "copied", "head", "tokens", "tied", "unchanged", "ignored"]
"""What happens to a tensor; ``unchanged`` ones are missing from the expert, ``tokens`` are rows that it alone has."""
MOST_GLOBS = 6
"""That an error has for the user to type"""


class BasePieces:
    """The pieces of a tensor of the base in the state's type, digested in passing; each may be asked for again."""

    def __init__(self, tensor: Tensor, dtype: torch.dtype) -> None:
        self._hasher = TensorHasher(tensor.dtype, tensor.shape)
        self._flat = tensor.reshape(-1)
        self._dtype = dtype
        self._start = -1

    def at(self, start: int, stop: int) -> Tensor:
        if start != self._start:
            stored = self._flat[start:stop]
            self._hasher.update(stored)
            self._start, self._piece = start, stored.to(self._dtype)
        return self._piece

    def digest(self) -> str:
        """Of the whole tensor, once all of its pieces have been asked for."""
        return self._hasher.hexdigest()


class TaskVector:
    """The difference of one expert from the base, tensor by tensor."""

    adapter_config: AdapterConfig | None = None
    """What the configuration of an adapter tells of it"""

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
        """``prefix`` is what the expert's own names differ by; here it has the base's."""
        self.model = model
        self.prefix = prefix or Prefix()
        self.base = base
        self.expert, self.tokens, told = fit(model, base, expert, vocab, (*ignore, *self.in_factors))
        self.notes = (*((self.renaming,) if self.renaming else ()), *told)
        """What is to be told of the expert, in sentences"""
        self.actions = plan_tensors(model, self.expert, partial=partial, ignore=ignore)
        self.names = model.merged
        self.heads = tuple(name for name in self.expert.tensors if self.actions.get(name) in ("head", "tokens"))
        """What stays with the expert"""
        self.digests = ResultsByTensor[str]()
        """Digests of the expert's tensors that have been read to their end."""
        self.norm2 = ResultsByTensor[float]()
        """‖Δ‖² of these"""

    @property
    def renaming(self) -> str | None:
        """A sentence about the expert's names, where they are not the base's."""
        return f"{self.expert.source}: {self.prefix}" if self.prefix else None

    @property
    def in_factors(self) -> Collection[str]:
        """The tensors whose Δ comes in factors."""
        return ()

    @property
    def inputs(self) -> tuple[Checkpoint, ...]:
        """What Δ is read from."""
        return self.base, self.expert

    @property
    def copies(self) -> int:
        """How often a tensor of base and expert is in memory while it is read."""
        return self.base.copies + self.expert.copies

    def numel(self, name: str) -> int:
        return self.model.tensors[name].numel

    def dtype(self, name: str) -> torch.dtype:
        return torch_dtype(self.model.tensors[name].state_dtype)

    def rank(self, name: str) -> int | None:
        """A bound of the rank of Δ where it comes in factors; None where it is dense."""
        return None

    def factors(self, name: str) -> LowRank:
        """Δ in factors, where ``rank`` is known."""
        raise NotImplementedError

    def elements(self, name: str, base: Elements | None = None) -> Elements:
        """Any range of Δ in memory of its own, neither checked nor digested.

        Task vectors that go side by side may share the ``base``.
        """
        import torch

        if not self._reads(name):
            return lambda start, stop: torch.zeros(stop - start, dtype=self.dtype(name))
        base, expert = base or self.base_elements(name), self.expert.read(self._stored(name)).reshape(-1)
        return lambda start, stop: _difference(expert[start:stop], base(start, stop))

    def base_elements(self, name: str) -> Elements:
        """Any range of the base in the state's type, read when it is needed first; the last one is kept."""
        flat = cache(lambda: self.base.read(name).reshape(-1))
        dtype = self.dtype(name)
        return lru_cache(maxsize=1)(lambda start, stop: flat()[start:stop].to(dtype))

    def base_pieces(self, name: str) -> BasePieces:
        return BasePieces(self.base.read(name), self.dtype(name))

    def pieces(self, name: str, base: BasePieces | None = None) -> Iterator[tuple[int, Tensor]]:
        """All of Δ in order, each piece with the number of its first element. Base and expert are verified.

        Task vectors that go side by side may share the pieces of the ``base``.
        """
        norm, reads = SquaredNorm(), self._reads(name)
        for start, delta in self._differences(name, base):
            if reads:  # else it is zero
                norm.add(delta)
            if not norm.finite:
                raise self._unusable(name)
            yield start, delta
        self.norm2[name] = norm.total()
        if not math.isfinite(self.norm2[name]):
            raise self._unusable(name)

    def whole(self, name: str) -> Tensor:
        """Δ in one piece, of the tensor's shape."""
        import torch

        delta = torch.empty(self.model.tensors[name].shape, dtype=self.dtype(name))
        flat = delta.view(-1)
        for start, piece in self.pieces(name):
            flat[start : start + piece.numel()] = piece
        return delta

    def _differences(self, name: str, shared: BasePieces | None) -> Iterator[tuple[int, Tensor]]:
        tensor = self.model.tensors[name]
        if not self._reads(name):
            zeros = self.elements(name)
            yield from ((start, zeros(start, stop)) for start, stop in ranges(tensor.numel))
            return
        base = shared or self.base_pieces(name)
        expert = self.expert.read(self._stored(name))
        hasher = TensorHasher(expert.dtype, expert.shape)
        expert = expert.reshape(-1)
        for start, stop in ranges(tensor.numel):
            theirs = expert[start:stop]
            hasher.update(theirs)
            yield start, _difference(theirs, base.at(start, stop))
        if tensor.digest and base.digest() != tensor.digest:
            raise base_changed(name, self.base)
        self.digests[name] = hasher.hexdigest()
        self._check_ties(name)

    def head(self, name: str) -> Tensor:
        tensor = self.expert.read(name)
        if not is_finite(tensor):
            raise unusable(name, self.expert)
        self.digests[name] = tensor_digest(tensor)
        return tensor

    def _reads(self, name: str) -> bool:
        return self.actions[name] not in ("unchanged", "ignored")

    def _stored(self, name: str) -> str:
        """The name under which the expert stores a tensor that may be tied to others."""
        if name in self.expert.tensors:
            return name
        return next(alias for alias in self._aliases(name) if alias in self.expert.tensors)

    def _aliases(self, name: str) -> list[str]:
        return [alias for alias, first in self.model.ties.items() if first == name]

    def _check_ties(self, name: str) -> None:
        stored = self._stored(name)
        for alias in self._aliases(name):
            present = alias in self.expert.tensors and self.actions.get(alias) == "tied" and alias != stored
            if present and tensor_digest(self.expert.read(alias)) != self.digests[name]:
                raise MergestreamError(
                    f"{self.expert.source} has different tensors {stored} and {alias}, which are one in the "
                    f"base; tie them again, or leave one out with --ignore {alias}"
                )

    def _unusable(self, name: str) -> MergestreamError:
        bad_base = self.base.has_weights and not is_finite(self.base.read(name))
        return unusable(name, self.base) if bad_base else unusable(self._stored(name), self.expert)


def _difference(theirs: Tensor, base: Tensor) -> Tensor:
    """θ − θ⁰ in the type of θ⁰, computed in place where θ had to be copied into that type."""
    converted = theirs.to(base.dtype)
    return converted - base if converted is theirs else converted.sub_(base)


def plan_tensors(
    model: BaseModel, expert: Checkpoint, *, partial: bool, ignore: Sequence[str]
) -> dict[str, TensorAction]:
    """What will happen to every tensor of base and expert, or an error that says what does not fit."""
    names = model.tensors.keys() | expert.tensors.keys()
    ignored: set[str] = set()
    for glob in ignore:
        matching = {name for name in names if fnmatchcase(name, glob) or fnmatchcase(expert.stored_name(name), glob)}
        if not matching:
            raise MergestreamError(f"--ignore {glob} matches no tensor of {expert.source} or its base")
        ignored |= matching
    aliases = model.ties
    stored = {*expert.tensors, *(aliases[name] for name in expert.tensors if name in aliases)}
    actions: dict[str, TensorAction] = {}
    missing = []
    for name, tensor in model.tensors.items():
        if name in ignored:
            actions[name] = "ignored"
        elif tensor.role in ("tied", "copied", "head"):
            actions[name] = tensor.role
        elif name in stored:
            actions[name] = "merged"
        elif partial:
            actions[name] = "unchanged"
        else:
            missing.append(name)
    extra = []
    for name in expert.tensors:
        if name in actions:
            continue
        if name in ignored:
            actions[name] = "ignored"
        elif name.startswith(ROWS) and isinstance(expert, FittedCheckpoint):
            actions[name] = "tokens"
        elif model.is_head(name):
            actions[name] = "head"
        elif name in aliases:
            actions[name] = "tied"
        else:
            extra.append(name)
    if missing:
        few_missing = len(missing) <= (1 - NEARLY_ALL) * len(model.merged)
        as_heads = f"; {_as_heads([*missing, *extra], actions, 'when the store is made')}" if few_missing else ""
        raise MergestreamError(
            f"{expert.source} lacks {_some(missing)} of the base; if they are meant to be unchanged, pass --partial"
            f"{as_heads}"
        )
    if extra:
        raise MergestreamError(
            f"{expert.source} has {_some(extra)} that the base has not; {_as_heads(extra, actions)}, "
            f"{_options('--ignore', extra, actions)} leaves it out"
        )
    for name, action in actions.items():
        if action in ("merged", "tied") and name in expert.tensors:
            _check_form(model, expert, name, aliases.get(name, name))
    return actions


def _check_form(model: BaseModel, expert: Checkpoint, name: str, canonical: str) -> None:
    ours, theirs, stored = model.tensors[canonical], expert.tensors[name], expert.stored_name(name)
    if theirs.shape != ours.shape:
        reason = ""
        if theirs.shape[1:] == ours.shape[1:]:
            others = [other for other in model.tensors if layer_of(other) != layer_of(name)]
            reason = f"{_as_heads([name], others, 'when the store is made')}; else "
        raise MergestreamError(
            f"tensor {stored} in {theirs.file} of {expert.source} has shape {list(theirs.shape)}, the base has "
            f"{list(ours.shape)}; {reason}resize it to the base's shape, or leave it out with --ignore {name}"
        )
    if not theirs.is_float:
        raise MergestreamError(
            f"tensor {stored} in {theirs.file} of {expert.source} is {theirs.dtype}, the base has {ours.dtype}; "
            "convert it to a floating-point type first"
        )


def _as_heads(names: Sequence[str], others: Collection[str], where: str = "in a store") -> str:
    return f"{_options('--heads', names, others)} {where} keeps what is a head with its expert"


def _options(option: str, names: Sequence[str], others: Collection[str]) -> str:
    """What to type so that it holds for these tensors; where that is long, the names tell enough."""
    globs = globs_of(names, others)
    return " ".join(f"{option} '{glob}'" for glob in globs) if len(globs) <= MOST_GLOBS else f"{option} GLOB"


def _some(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"tensor {names[0]}"
    return f"{len(names)} tensors ({shorten_list(names)})"
