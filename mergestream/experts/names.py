"""A constant prefix that an expert's names have and the base's have not, or the other way round.

A task model has its encoder under the name of its family (``bert.``), DistributedDataParallel puts ``module.`` before
every name, torch.compile ``_orig_mod.``, Lightning what the attribute was called. Names and shapes tell.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from mergestream.checkpoints import Checkpoint
from mergestream.checkpoints.checkpoint import RenamedCheckpoint
from mergestream.errors import MergestreamError

if TYPE_CHECKING:
    from mergestream.base.model import BaseModel

NEARLY_ALL = 0.8
"""Of the base's matrices must be found in their shapes: one layer of BERT with a classifier and a pooler has as many.
What is missing then is still asked about."""
Shape = tuple[int, ...]
_ANCHORS = 8
"""Matrices of the base that are looked for in the expert by the ends of their names, for all would take long"""


@dataclass(frozen=True)
class Prefix:
    """What the expert has in its names where the base has something else; empty where it has nothing."""

    theirs: str = ""
    ours: str = ""
    wrapper: str = ""
    """The part of ``theirs`` that all names of the expert have: whatever wrote it, no model is loaded by it"""

    def names_in_base(self, name: str) -> tuple[str, str]:
        """What the base may call a tensor of the expert: with its own prefix, and as the expert's class calls it."""
        moved = self.ours + name.removeprefix(self.theirs) if name.startswith(self.theirs) else name
        return moved, name.removeprefix(self.wrapper)

    def name_in_task(self, name: str) -> str:
        """What the expert's class calls a tensor of the base."""
        if not name.startswith(self.ours):
            return name
        return self.theirs.removeprefix(self.wrapper) + name.removeprefix(self.ours)

    def __bool__(self) -> bool:
        return bool(self.theirs or self.ours)

    def __str__(self) -> str:
        """What is done about it, in words."""
        if self.theirs and self.ours:
            return f"the prefix {self.theirs} of its names is read as the base's {self.ours}"
        if self.theirs:
            return f"the prefix {self.theirs} of its names is taken off, for the base has none"
        return f"its names get the prefix {self.ours} that the base's have"


def under_base_names(model: BaseModel, expert: Checkpoint, ignore: Sequence[str]) -> tuple[Checkpoint, Prefix]:
    """The expert under the names of the base. Tensors that the base has not keep what the expert's class calls them;
    the globs in ``ignore`` are of the expert's names, or of the base's."""
    ignored = {name for name in expert.tensors if any(fnmatchcase(name, glob) for glob in ignore)}
    considered = {name: info.shape for name, info in expert.tensors.items() if name not in ignored}
    prefix = _find(model, considered, expert.source)
    known = {**model.spellings, **{name: name for name in (*model.tied_names, *model.tensors)}}
    stored: dict[str, str] = {}
    for name in sorted(expert.tensors, key=ignored.__contains__):
        names = prefix.names_in_base(name)
        called = next((known[candidate] for candidate in names if candidate in known), names[-1])
        if called in stored and name in ignored:
            called = name
        if called in stored:
            raise MergestreamError(
                f"{expert.source} has both {stored[called]} and {name} for the tensor {called} of the base; leave one "
                f"of them out with --ignore"
            )
        stored[called] = name
    same = all(called == name for called, name in stored.items())
    return (expert if same else RenamedCheckpoint(expert, stored)), prefix


def prefix_between(names: Mapping[str, str | None]) -> Prefix:
    """The prefix of most names, given with those of the base for them, where there are."""
    found = [pair for name, target in names.items() if target and (pair := _before_common_end(name, target))]
    return Prefix(*max(found, key=found.count)) if found else Prefix()


def _find(model: BaseModel, expert: Mapping[str, Shape], source: str) -> Prefix:
    """The one prefix by which nearly all matrices of the base are found, as they are stored or else as the base's class
    calls them; none where they are found without, or not at all."""
    merged = {name: model.tensors[name].shape for name in model.merged}
    matrices = {name: shape for name, shape in merged.items() if len(shape) > 1} or merged
    spelled = {stored: spelling for spelling, stored in model.spellings.items()}
    called = {spelled.get(name, name): shape for name, shape in matrices.items()}
    return _fitting(matrices, expert, source) or (_fitting(called, expert, source) if spelled else None) or Prefix()


def _fitting(matrices: Mapping[str, Shape], expert: Mapping[str, Shape], source: str) -> Prefix | None:
    def share(prefix: Prefix) -> float:
        found = {prefix.names_in_base(name)[0]: shape for name, shape in expert.items()}
        return sum(found.get(name) == shape for name, shape in matrices.items()) / len(matrices)

    if not expert or share(Prefix()) >= NEARLY_ALL:
        return Prefix()
    shares = {prefix: share(prefix) for prefix in _candidates(matrices, expert)}
    fitting = {prefix: found for prefix, found in shares.items() if found >= NEARLY_ALL}
    # Of several, one that finds all is no guess.
    best = [prefix for prefix, found in fitting.items() if found == 1] or list(fitting)
    if len(best) > 1:
        name = next(iter(matrices))
        rivals = sorted(prefix.theirs + name.removeprefix(prefix.ours) for prefix in best)
        glob = globs_of(rivals[-1:], rivals[:-1])[0]
        raise MergestreamError(
            f"{source} has the base's tensors more than once ({' and '.join(rivals)} for {name}); leave all but one of "
            f"them out, as by --ignore '{glob}'"
        )
    return best[0] if best else None


def _candidates(base: Mapping[str, Shape], expert: Mapping[str, Shape]) -> set[Prefix]:
    anchors = list(base)[:: len(base) // _ANCHORS or 1]
    pairs = {
        pair
        for anchor in anchors
        for name, shape in expert.items()
        if shape == base[anchor] and (pair := _before_common_end(name, anchor))
    }
    return {Prefix(theirs, ours, _common(theirs, expert)) for theirs, ours in pairs}


def _before_common_end(theirs: str, ours: str) -> tuple[str, str] | None:
    """What two names have before the end that they share. None where they share too little (what both call ``weight``
    may be anything), or the number of a layer is in it: another layer is another tensor."""
    one, other, shared = theirs.split("."), ours.split("."), 0
    while one and other and one[-1] == other[-1]:
        one.pop()
        other.pop()
        shared += 1
    if shared < (2 if one and other else 1) or any(piece.isdigit() for piece in (*one, *other)):
        return None
    return "".join(f"{piece}." for piece in one), "".join(f"{piece}." for piece in other)


def _common(prefix: str, names: Collection[str]) -> str:
    """As much of a prefix as all names begin with."""
    places = reversed(_places(prefix))
    return next((place for place in places if all(name.startswith(place) for name in names)), "")


def globs_of(names: Iterable[str], others: Collection[str]) -> list[str]:
    """The shortest globs that match these names, whole modules at once, and none of the others."""
    taken = {place for other in others for place in _places(other)}
    found = (next((place for place in _places(name) if place not in taken), name) for name in names)
    return [f"{place}*" if place.endswith(".") else place for place in dict.fromkeys(found)]


def _places(name: str) -> list[str]:
    """``a.`` and ``a.b.`` for ``a.b.weight``"""
    return [name[: end + 1] for end, character in enumerate(name) if character == "."]
