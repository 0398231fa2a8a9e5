"""What each tensor of the base is, and by which rule: methods treat the weights of linear layers specially.

The architecture decides where the directory has a ``config.json`` that transformers knows. Otherwise, and
for every tensor that the architecture does not know, its name and shape decide.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mergestream.base.architecture import Architecture, Slot, load_architecture
from mergestream.digest import tensor_digest
from mergestream.errors import MergestreamError, UsageError
from mergestream.files import read_json

if TYPE_CHECKING:
    from mergestream.checkpoints import Checkpoint, TensorInfo

Role = Literal["linear", "embedding", "other", "copied", "head", "tied"]


@dataclass(frozen=True)
class TensorRole:
    """One tensor's role. A ``linear`` tensor of three dimensions is one matrix per index of the first."""

    role: Role
    rule: str
    """Why, for people"""
    tied_to: str | None = None
    module: str | None = None
    """The class of the module whose weight it is (``torch.nn.Conv2d``, ``Conv1D``), where the architecture tells"""


@dataclass(frozen=True)
class Tie:
    """Two names of one tensor, and how we know."""

    first: str
    second: str
    reason: str


def find_roles(
    base: Checkpoint, *, linear: Sequence[str] = (), not_linear: Sequence[str] = (), heads: Sequence[str] = ()
) -> dict[str, TensorRole]:
    """The part that every tensor of the base plays, in the base's order.

    ``linear`` and ``not_linear`` are globs that override what is found; tensors that match one of ``heads``
    are kept per expert. Tied tensors are one part: the embedding among them, or else the first, has the role
    and the others are ``tied`` to it.
    """
    architecture = _architecture(base)
    found = {name: _part(name, info, architecture) for name, info in base.tensors.items()}
    ties = [Tie(name, target, "shares storage with") for name, target in base.aliases.items()]
    ties += _ties_of_architecture(base, found, architecture)
    ties += _ties_by_bytes(base, found, architecture)
    ties = [tie for tie in ties if found[tie.first].role != "copied"]
    overrides = _overrides(base, found, linear, not_linear)
    kept: dict[str, TensorRole] = {}
    for glob in heads:
        kept |= {name: replace(found[name], role="head", rule=f"--heads {glob}") for name in _matching(glob, found)}
    parts = found | overrides
    for group in _groups(ties, found):
        parts |= _tied(group, found, overrides, kept)
    return parts | kept


def tied_names(base: Checkpoint, parts: Mapping[str, TensorRole]) -> dict[str, str]:
    """Names that an expert may store and the base does not, because they are tied to one that it stores."""
    architecture = _architecture(base)
    if isinstance(architecture, Architecture):
        return _absent_names(architecture, parts)
    words = [name for name, part in parts.items() if part.role == "embedding" and _usual_aliases(name)]
    if len(words) != 1 or base.directory is None or not _config_ties_embeddings(base.directory):
        return {}
    return {alias: words[0] for alias in _usual_aliases(words[0]) if alias not in parts}


def model_names(base: Checkpoint) -> dict[str, str]:
    """The stored tensor for every name that the model's class has for it, where the two differ."""
    architecture = _architecture(base)
    if not isinstance(architecture, Architecture):
        return {}
    called = {architecture.slot_of(name): name for name in base.tensors}
    return {slot: name for slot, name in called.items() if slot is not None and slot != name}


# --- one tensor -------------------------------------------------------------------------------------------

# The module that owns a weight is the last component of its name that is no number.
_EMBEDDING = re.compile(
    r"^(?!patch_)("  # patches are projected, not looked up
    r"wte|wpe|shared|codebook|embed_(?!out$).*"  # embed_out is GPT-NeoX's head
    r"|(.*_)?emb(s|ed|eds|edding|eddings)?(_table|_layers?|_\d+)?"
    r"|.*relative_(attention|position)_bias.*"
    r")$"
)
_NORM = re.compile(r"norm|(^|_)(ln|bn)(_|\d|$)", re.IGNORECASE)
_EXPERTS = re.compile(r"expert|(^|[._])moe([._]|$)", re.IGNORECASE)


def _architecture(base: Checkpoint) -> Architecture | str:
    """The architecture, or the reason why the rule decides (empty where no config asks for another)."""
    if base.directory is None or not (base.directory / "config.json").is_file():
        return ""
    return load_architecture(base.directory)


def _part(name: str, info: TensorInfo, architecture: Architecture | str) -> TensorRole:
    if not info.is_float:
        return TensorRole("copied", f"{'boolean' if info.dtype == 'BOOL' else 'integer'} tensor")
    ndim = len(info.shape)
    if isinstance(architecture, str):
        return _by_rule(name, ndim, architecture)
    slot = architecture.slots.get(architecture.slot_of(name) or "")
    if slot is None:
        return _by_rule(name, ndim, f"not in {architecture.name}")
    part = _by_architecture(name, ndim, slot, f"{slot.owner} in {architecture.name}")
    return replace(part, module=slot.module) if slot.is_weight else part


def _by_architecture(name: str, ndim: int, slot: Slot, rule: str) -> TensorRole:
    if slot.kind == "custom":
        if ndim == 3 and _EXPERTS.search(slot.owner):
            return TensorRole("linear", f"3-D, {rule}")
        return _by_rule(name, ndim, rule)
    if slot.kind == "linear":
        # Stored otherwise than it is used (a convolution that became a linear layer): no matrix on disk.
        return TensorRole("linear", rule) if ndim == 2 else _by_rule(name, ndim, rule)
    return TensorRole("embedding" if slot.kind == "embedding" else "other", rule)


def _by_rule(name: str, ndim: int, note: str) -> TensorRole:
    """What name and number of dimensions tell; ``note`` says why nothing better is known."""
    path, _, leaf = name.rpartition(".")
    owner = next((piece for piece in reversed(path.split(".")) if not piece.isdigit()), "")
    suffix = f" ({note})" if note else ""
    if ndim == 3 and _EXPERTS.search(name) and not leaf.endswith("bias"):
        return TensorRole("linear", f"3-D, stacked experts{suffix}")
    if ndim != 2:
        return TensorRole("other", f"{ndim}-D{suffix}")
    if leaf != "weight":
        return TensorRole("other", f"2-D, not *.weight{suffix}")
    if _EMBEDDING.search(owner):
        return TensorRole("embedding", f"2-D *.weight, named as an embedding{suffix}")
    if _NORM.search(owner):
        return TensorRole("other", f"2-D *.weight, named as a norm{suffix}")
    return TensorRole("linear", f"2-D *.weight{suffix}")


# --- what the user says -----------------------------------------------------------------------------------


def _matching(glob: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if fnmatchcase(name, glob)]


def _overrides(
    base: Checkpoint, found: Mapping[str, TensorRole], linear: Sequence[str], not_linear: Sequence[str]
) -> dict[str, TensorRole]:
    options: list[tuple[str, Role, Sequence[str]]] = [
        ("--linear", "linear", linear),
        ("--not-linear", "other", not_linear),
    ]
    chosen: dict[str, TensorRole] = {}
    for option, role, globs in options:
        for glob in globs:
            names = _matching(glob, base.tensors)
            if not names:
                raise UsageError(f"{option} {glob} matches no tensor of {base.source}: check the spelling")
            for name in names:
                info, part = base.tensors[name], replace(found[name], role=role, rule=f"{option} {glob}")
                if role == "linear" and not (info.is_float and len(info.shape) in (2, 3)):
                    raise UsageError(
                        f"{part.rule} matches {name} ({info.dtype}, shape {list(info.shape)}); only floating "
                        "tensors of 2 or 3 dimensions can be linear weights: narrow the glob"
                    )
                if chosen.get(name, part).role != role:
                    raise UsageError(
                        f"{name} is matched by both {chosen[name].rule} and {part.rule}: narrow one of them"
                    )
                if info.is_float:  # integers are copied, whatever is said of them
                    chosen[name] = part
    return chosen


# --- tied tensors -----------------------------------------------------------------------------------------


def _ties_of_architecture(
    base: Checkpoint, found: dict[str, TensorRole], architecture: Architecture | str
) -> list[Tie]:
    """Ties that the model makes, where the stored values agree; where they do not, the rules in ``found`` say so."""
    if isinstance(architecture, str):
        return []
    stored: dict[str | None, list[str]] = {}
    for name in found:
        stored.setdefault(architecture.slot_of(name), []).append(name)
    ties: list[Tie] = []
    for group in architecture.ties:
        names = [stored[slot][0] for slot in group if len(stored.get(slot, ())) == 1]
        classes = _classes_of_equal_bytes(base, names)
        for same in classes:
            ties += [Tie(name, same[0], f"tied by {architecture.name} to") for name in same[1:]]
        if len(classes) > 1:
            note = f" ({architecture.name} ties it, but the stored values differ)"
            found |= {name: replace(found[name], rule=found[name].rule + note) for name in names}
        elif names and all(found[name].role == "linear" for name in names):
            # Only the head is stored: the embedding that it is tied to is not, but it counts as one.
            embeddings = [slot for slot in group if architecture.slots[slot].kind == "embedding"]
            if embeddings:
                rule = f"tied by {architecture.name} to {embeddings[0]}"
                found[names[0]] = replace(found[names[0]], role="embedding", rule=rule)
    return ties


def _ties_by_bytes(base: Checkpoint, found: dict[str, TensorRole], architecture: Architecture | str) -> list[Tie]:
    """Matrices equal to an embedding, unless the architecture knows both: then it is the one to say.

    Equal linear weights are no tie, for deepened models repeat layers; nor are constants, for two
    embeddings may both start at zero.
    """
    known = set() if isinstance(architecture, str) else {n for n in found if architecture.slot_of(n)}
    by_form: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name, part in found.items():
        if part.role in ("linear", "embedding"):
            info = base.tensors[name]
            by_form.setdefault((info.dtype, info.shape), []).append(name)
    ties: list[Tie] = []
    for names in by_form.values():
        if known.issuperset(names) or not any(found[name].role == "embedding" for name in names):
            continue
        for same in _classes_of_equal_bytes(base, names):
            embedding = next((name for name in same if found[name].role == "embedding"), None)
            if embedding is None or len(same) == 1 or _is_constant(base, embedding):
                continue
            others = [name for name in same if name != embedding and not known.issuperset((name, embedding))]
            ties += [Tie(name, embedding, "same bytes as") for name in others]
    return ties


def _classes_of_equal_bytes(base: Checkpoint, names: Sequence[str]) -> list[list[str]]:
    """The names in classes of equal dtype, shape and bytes; the first values tell most tensors apart."""
    alike: dict[tuple[object, ...], list[str]] = {}
    for name in names:
        info = base.tensors[name]
        start = tensor_digest(base.read(name).flatten()[:1024]) if len(names) > 1 else ""
        alike.setdefault((info.dtype, info.shape, start), []).append(name)
    equal: dict[tuple[object, ...], list[str]] = {}
    for key, candidates in alike.items():
        for name in candidates:
            digest = tensor_digest(base.read(name)) if len(candidates) > 1 else ""
            equal.setdefault((key, digest), []).append(name)
    return list(equal.values())


def _is_constant(base: Checkpoint, name: str) -> bool:
    values = base.read(name)
    return values.numel() == 0 or bool(values.min() == values.max())


def _groups(ties: Iterable[Tie], order: Iterable[str]) -> list[dict[str, str]]:
    """Connected names, each with the reason why it is in its group, in the base's order."""
    groups: dict[str, dict[str, str]] = {}
    for tie in ties:
        joined = groups.setdefault(tie.second, {tie.second: tie.reason})
        other = groups.setdefault(tie.first, {tie.first: tie.reason})
        if joined is not other:
            joined |= other
            groups |= dict.fromkeys(other, joined)
    rank = {name: position for position, name in enumerate(order)}
    unique = {id(group): group for group in groups.values()}.values()
    return [dict(sorted(group.items(), key=lambda item: rank[item[0]])) for group in unique]


def _tied(
    group: dict[str, str], found: dict[str, TensorRole], overrides: dict[str, TensorRole], kept: dict[str, TensorRole]
) -> dict[str, TensorRole]:
    """One part for the whole group: what the user says of any member holds for all, for they are one."""
    merged = [name for name in group if name not in kept]
    if merged and len(merged) < len(group):
        head = next(name for name in group if name in kept)
        raise UsageError(
            f"{kept[head].rule} matches {head}, which is tied to {merged[0]}, and that is merged: match both or neither"
        )
    said = {overrides[name].role: name for name in group if name in overrides}
    if len(said) > 1:
        raise UsageError(
            f"{said['linear']} is matched by {overrides[said['linear']].rule} and {said['other']} by "
            f"{overrides[said['other']].rule}, but they are tied: narrow one of them"
        )
    canonical = next((name for name in group if found[name].role == "embedding"), next(iter(group)))
    parts = {
        name: replace(found[name], role="tied", rule=f"{reason} {canonical}", tied_to=canonical)
        for name, reason in group.items()
    }
    decided = next((overrides[name] for name in said.values()), found[canonical])
    parts[canonical] = replace(found[canonical], role=decided.role, rule=decided.rule)
    return parts


# --- names of a tied tensor that the base does not store ---------------------------------------------------

# What is tied to a word embedding in the usual models, by the embedding's own name.
_TIED_TO = {
    "embed_tokens": ("lm_head",),
    "wte": ("lm_head",),
    "word_embeddings": ("lm_head", "lm_head.decoder", "cls.predictions.decoder"),
    "embed_in": ("embed_out",),
    "shared": ("lm_head", "encoder.embed_tokens", "decoder.embed_tokens"),
}


def _absent_names(architecture: Architecture, parts: Mapping[str, TensorRole]) -> dict[str, str]:
    """The names in the architecture's ties that ``parts`` lacks, each with the tensor that stands for it."""
    slots, slot_of = architecture.slots, architecture.slot_of
    stored = {slot_of(name): parts[name].tied_to or name for name in parts}
    names: dict[str, str] = {}
    for group in architecture.ties:
        present = {stored[slot]: slots[slot].kind for slot in group if slot in stored}
        spellings = {*group}.union(*map(_usual_aliases, present))
        for spelling in sorted(spellings):
            slot = slot_of(spelling)
            if slot in group and slot not in stored:
                # Stored with different values, head and embedding are two: the absent one is as its like.
                like = [name for name, kind in present.items() if len(present) == 1 or kind == slots[slot].kind]
                names |= {spelling: like[0]} if len(like) == 1 else {}
    return names


def _usual_aliases(name: str) -> list[str]:
    """The usual names of tensors tied to ``name``, at every level of the model above it."""
    *path, owner, leaf = ["", *name.split(".")]
    prefixes = ["".join(f"{piece}." for piece in path[1:depth]) for depth in range(1, len(path) + 1)]
    return [f"{prefix}{alias}.{leaf}" for prefix in prefixes for alias in _TIED_TO.get(owner, ())]


def _config_ties_embeddings(directory: Path) -> bool:
    try:
        config = read_json(directory / "config.json")
        return {**(config.get("text_config") or {}), **config}.get("tie_word_embeddings") is True
    except (MergestreamError, TypeError):  # there is none, or its text_config is no object
        return False
