"""Match the tensor names of an expert to those of the base, which often differ by a prefix.

A task model puts its encoder under the name of its family (``bert.``), DistributedDataParallel adds ``module.``,
torch.compile ``_orig_mod.``, Lightning the name of an attribute. Names and shapes show which prefix it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from mergestream.checkpoints import Checkpoint
from mergestream.checkpoints.checkpoint import RenamedCheckpoint
from mergestream.errors import MergestreamError

if TYPE_CHECKING:
    from mergestream.base.model import BaseModel

NEARLY_ALL = 0.8
"""Share of the base's matrices that a prefix must find with their shapes. It is below 1 because experts may lack some,
such as the pooler of a small BERT; a tensor that is missing is still an error."""
_FEWEST = 4
"""Fewest tensors of an expert that may be a part of the base"""
Shape = tuple[int, ...]
_ANCHORS = 8
"""Matrices of the base whose names suggest prefixes; trying all would take long"""


@dataclass(frozen=True)
class Prefix:
    """The prefix of the expert's names, and of the base's names in its place; empty if they have none."""

    theirs: str = ""
    ours: str = ""
    wrapper: str = ""
    """The part of ``theirs`` that all names of the expert have; no model class expects it"""

    def names_in_base(self, name: str) -> tuple[str, str]:
        """Possible names in the base for a tensor of the expert: with the base's prefix, and without the wrapper."""
        moved = self.ours + name.removeprefix(self.theirs) if name.startswith(self.theirs) else name
        return moved, name.removeprefix(self.wrapper)

    def name_in_task(self, name: str) -> str:
        """The name in the expert's class for a tensor of the base."""
        if not name.startswith(self.ours):
            return name
        return self.theirs.removeprefix(self.wrapper) + name.removeprefix(self.ours)

    def __bool__(self) -> bool:
        return bool(self.theirs or self.ours)

    def __str__(self) -> str:
        """What happens to the names, as a sentence for the user."""
        if self.theirs and self.ours:
            return f"the prefix {self.theirs} of its names is read as the base's {self.ours}"
        if self.theirs:
            return f"the prefix {self.theirs} of its names is removed, because the base has none"
        return f"its names get the prefix {self.ours} of the base"


# --- full checkpoints: names and shapes ---------------------------------------------------------------------


def under_base_names(model: BaseModel, expert: Checkpoint, ignore: Sequence[str]) -> tuple[Checkpoint, Prefix]:
    """Rename an expert's tensors to the base's names; tensors that the base lacks keep the name in their class.

    The globs in ``ignore`` match the expert's names or the base's.
    """
    ignored = {name for name in expert.tensors if any(fnmatchcase(name, glob) for glob in ignore)}
    considered = {name: info.shape for name, info in expert.tensors.items() if name not in ignored}
    prefix = _find_prefix(model, considered, expert.source)
    known = {**model.spellings, **{name: name for name in (*model.tied_names, *model.tensors)}}
    stored: dict[str, str] = {}
    for name in sorted(expert.tensors, key=ignored.__contains__):
        names = prefix.names_in_base(name)
        new = next((known[candidate] for candidate in names if candidate in known), names[-1])
        if new in stored and name in ignored:
            new = name
        if new in stored:
            raise MergestreamError(
                f"{expert.source} has both {stored[new]} and {name} for the tensor {new} of the base; leave one of "
                "them out with --ignore"
            )
        stored[new] = name
    for alias, name in model.ties.items():  # the expert may store a tied tensor by its other name only
        if alias in stored and name not in stored and stored[alias] not in ignored:
            stored[name] = stored.pop(alias)
    is_same = all(new == name for new, name in stored.items())
    return (expert if is_same else RenamedCheckpoint(expert, stored)), prefix


def _find_prefix(model: BaseModel, expert: Mapping[str, Shape], source: str) -> Prefix:
    """Find the prefix that matches nearly all matrices of the base, by their stored names or those in its class.

    If there is none, the expert may be a part of the base, such as a tower of CLIP, saved without the part's prefix.
    """
    merged = {name: model.tensors[name].shape for name in model.merged}
    spelled = {stored: spelling for spelling, stored in model.spellings.items()}
    for base in (merged, {spelled.get(name, name): shape for name, shape in merged.items()}):
        found = _fit_prefix(base, expert)
        if len(found) > 1:
            name = next(name for name, shape in base.items() if len(shape) > 1)
            rivals = sorted(prefix.theirs + name.removeprefix(prefix.ours) for prefix in found)
            glob = find_globs(rivals[-1:], rivals[:-1])[0]
            raise MergestreamError(
                f"{source} has the base's tensors more than once ({' and '.join(rivals)} for {name}); leave out all "
                f"but one of them, for example with --ignore '{glob}'"
            )
        if found:
            return found[0]
    part = _fit_prefix(expert, merged) if len(expert) >= _FEWEST else []
    return Prefix(ours=part[0].theirs) if len(part) == 1 and not part[0].ours else Prefix()


def _fit_prefix(base: Mapping[str, Shape], expert: Mapping[str, Shape]) -> list[Prefix]:
    """The prefixes with which the expert has nearly all matrices of the base, with their shapes."""
    matrices = {name: shape for name, shape in base.items() if len(shape) > 1} or base

    def share(prefix: Prefix) -> float:
        found = {prefix.names_in_base(name)[0]: shape for name, shape in expert.items()}
        return sum(found.get(name) == shape for name, shape in matrices.items()) / len(matrices)

    if not expert or not matrices or share(Prefix()) >= NEARLY_ALL:
        return [Prefix()]
    anchors = list(matrices)[:: len(matrices) // _ANCHORS or 1]
    alike = ((name, anchor) for anchor in anchors for name, shape in expert.items() if shape == matrices[anchor])
    shares: dict[Prefix, float] = {}
    for theirs, ours in {pair for names in alike if (pair := _split_common_end(*names))}:
        wrapper = next((p for p in reversed(_parents(theirs)) if all(name.startswith(p) for name in expert)), "")
        prefix = Prefix(theirs, ours, wrapper)
        shares[prefix] = share(prefix)
    fitting = [prefix for prefix, found in shares.items() if found >= NEARLY_ALL]
    return [prefix for prefix in fitting if shares[prefix] == 1] or fitting


def _split_common_end(theirs: str, ours: str) -> tuple[str, str] | None:
    """What two names have before their common end.

    None if they share too little (``weight`` alone may be anything), or if the rest contains the number of a layer:
    another layer is another tensor.
    """
    one, other, shared = theirs.split("."), ours.split("."), 0
    while one and other and one[-1] == other[-1]:
        one.pop()
        other.pop()
        shared += 1
    if shared < (2 if one and other else 1) or any(piece.isdigit() for piece in (*one, *other)):
        return None
    return "".join(f"{piece}." for piece in one), "".join(f"{piece}." for piece in other)


# --- adapters: names only -----------------------------------------------------------------------------------


def make_translator(names: Iterable[str], spellings: Mapping[str, str]) -> Callable[[str], str | None]:
    """Make a function from parameter names of an adapter to tensors of the base, given the adapter's ``names``.

    ``spellings`` maps every known name of a tensor, stored or in the model's class, to the stored one. An adapter may
    have been made with another class, which has the same modules under another prefix (``transformer.h.0…`` for
    ``h.0…``). So unknown names lose or gain one common prefix, the shortest that makes all of them known.
    """
    unknown = [name for name in names if name not in spellings]
    fitting: dict[tuple[int, int], list[tuple[str, str]]] = {}
    pairs = (_split_common_end(unknown[0], known) for known in spellings) if unknown else ()
    for old, new in filter(None, pairs):
        if old and new:
            continue
        if all(name.startswith(old) and new + name.removeprefix(old) in spellings for name in unknown):
            fitting.setdefault((old.count("."), new.count(".")), []).append((old, new))
    best = fitting[min(fitting)] if fitting else [("", "")]
    targets = {spellings.get(new + unknown[0].removeprefix(old)) for old, new in best if unknown}
    if len(targets) > 1:
        raise MergestreamError(
            f"{unknown[0]} may stand for {' or '.join(sorted(map(str, targets)))} of the base: "
            "make the adapter with the class that the base's config.json names"
        )
    old, new = best[0]

    def translate(name: str) -> str | None:
        if name not in spellings and name.startswith(old):
            name = new + name.removeprefix(old)
        return spellings.get(name)

    return translate


def prefix_between(names: Mapping[str, str | None]) -> Prefix:
    """The prefix of most names; ``names`` maps them to the base's names, or to None."""
    found = [pair for name, target in names.items() if target and (pair := _split_common_end(name, target))]
    return Prefix(*max(found, key=found.count)) if found else Prefix()


# --- globs ----------------------------------------------------------------------------------------------------


def find_globs(names: Iterable[str], others: Collection[str]) -> list[str]:
    """The shortest globs that match ``names``, whole modules at once, and none of the others."""
    taken = {parent for other in others for parent in _parents(other)}
    found = (next((parent for parent in _parents(name) if parent not in taken), name) for name in names)
    return [f"{parent}*" if parent.endswith(".") else parent for parent in dict.fromkeys(found)]


def _parents(name: str) -> list[str]:
    """``a.`` and ``a.b.`` for ``a.b.weight``."""
    return [name[: end + 1] for end, character in enumerate(name) if character == "."]
