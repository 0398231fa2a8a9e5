"""What each tensor of the base is, and by which rule: methods treat the weights of linear layers specially.

The architecture decides where the directory has a ``config.json`` that transformers knows. Otherwise, and
for every tensor that the architecture does not know, its name and shape decide.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mergestream.architecture import Architecture, load_architecture
from mergestream.digest import tensor_digest
from mergestream.errors import MergestreamError, UsageError

if TYPE_CHECKING:
    from mergestream.checkpoints import Checkpoint, TensorInfo

Role = Literal["linear", "embedding", "other", "copied", "head", "tied"]


@dataclass(frozen=True)
class Part:
    """One tensor's role. A ``linear`` tensor of three dimensions is one matrix per index of the first."""

    role: Role
    rule: str
    tied_to: str | None = None


@dataclass(frozen=True)
class Tie:
    """Two names of one tensor, and how we know."""

    first: str
    second: str
    reason: str


def anatomy(
    base: Checkpoint, *, linear: Sequence[str] = (), not_linear: Sequence[str] = (), heads: Sequence[str] = ()
) -> dict[str, Part]:
    """The part that every tensor of the base plays, in the base's order.

    ``linear`` and ``not_linear`` are globs that override what is found; tensors that match one of ``heads``
    are kept per expert. Tied tensors are one part: the embedding among them, or else the first, has the role
    and the others are ``tied`` to it.
    """
    architecture = _architecture(base)
    parts = {name: _part(name, info, architecture) for name, info in base.tensors.items()}
    ties = [Tie(name, target, "shares storage with") for name, target in base.aliases.items()]
    if isinstance(architecture, Architecture):
        ties += _ties_of_architecture(base, architecture, parts)
    else:
        ties += _ties_by_bytes(base, parts)
    overrides = _overrides(base, linear, not_linear)
    chosen_heads = {
        name: Part("head", f"--heads {glob}") for glob in heads for name in _matching(glob, parts)
    }
    said = parts | overrides
    for group in _groups(ties, parts):
        said |= _tied(group, parts, overrides, chosen_heads)
    return said | chosen_heads


def tied_names(base: Checkpoint, parts: dict[str, Part]) -> dict[str, str]:
    """Names that an expert may store and the base does not, because they are tied to one that it stores."""
    architecture = _architecture(base)
    found: dict[str, str] = {}
    if isinstance(architecture, Architecture):
        stored = {architecture.slot_of(name): name for name in reversed(parts)}
        for group in architecture.ties:
            present = {_canonical(stored[slot], parts) for slot in group if slot in stored}
            if len(present) == 1:
                (name,) = present
                spellings = [*group, *_known_spellings(name)]
                found |= {s: name for s in spellings if s not in parts and architecture.slot_of(s) in group}
    elif _config_ties_embeddings(base.directory):
        embeddings = [n for n in parts if parts[n].role == "embedding" and _WORD_EMBEDDING.search(n)]
        if len(embeddings) == 1:
            found = {s: embeddings[0] for s in _known_spellings(embeddings[0]) if s not in parts}
    return found


# --- one tensor -------------------------------------------------------------------------------------------

# The module that owns a weight is the last component of its name that is no number.
_EMBEDDING = re.compile(
    r"^(wte|wpe|shared|codebook|embed_(?!out$).*)$"
    r"|(^|_)emb(s|ed|eds|edding|eddings)?(_table)?$"
    r"|relative_(attention|position)_bias"
)
_NORM = re.compile(r"norm|(^|_)(ln|bn)(_|\d|$)", re.IGNORECASE)
_EXPERTS = re.compile(r"expert|(^|[._])moe([._]|$)", re.IGNORECASE)


def _architecture(base: Checkpoint) -> Architecture | str:
    """The architecture, or the reason why the rule decides (empty where no config asks for another)."""
    if base.directory is None or not (base.directory / "config.json").is_file():
        return ""
    return load_architecture(base.directory)


def _part(name: str, info: TensorInfo, architecture: Architecture | str) -> Part:
    if not info.is_float:
        return Part("copied", f"{'boolean' if info.dtype == 'BOOL' else 'integer'} tensor")
    ndim = len(info.shape)
    if isinstance(architecture, str):
        return _by_rule(name, ndim, architecture)
    slot = architecture.slots.get(architecture.slot_of(name) or "")
    if slot is None:
        return _by_rule(name, ndim, f"not in {architecture.name}")
    rule = f"{slot.owner} in {architecture.name}"
    if slot.kind == "custom":
        if ndim == 3 and _EXPERTS.search(slot.owner):
            return Part("linear", f"3-D, {rule}")
        return _by_rule(name, ndim, rule)
    if slot.kind == "linear":
        # Stored otherwise than it is used (a convolution that became a linear layer): no matrix on disk.
        return Part("linear", rule) if ndim == 2 else _by_rule(name, ndim, rule)
    return Part("embedding" if slot.kind == "embedding" else "other", rule)


def _by_rule(name: str, ndim: int, remark: str) -> Part:
    """What name and number of dimensions tell; ``remark`` says why nothing better is known."""
    path, _, leaf = name.rpartition(".")
    owner = next((piece for piece in reversed(path.split(".")) if not piece.isdigit()), "")
    suffix = f" ({remark})" if remark else ""
    if ndim == 3 and _EXPERTS.search(name) and not leaf.endswith("bias"):
        return Part("linear", f"3-D, stacked experts{suffix}")
    if ndim != 2:
        return Part("other", f"{ndim}-D{suffix}")
    if leaf != "weight":
        return Part("other", f"2-D, not *.weight{suffix}")
    if _EMBEDDING.search(owner):
        return Part("embedding", f"2-D *.weight, named as an embedding{suffix}")
    if _NORM.search(owner):
        return Part("other", f"2-D *.weight, named as a norm{suffix}")
    return Part("linear", f"2-D *.weight{suffix}")


# --- what the user says -----------------------------------------------------------------------------------


def _matching(glob: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if fnmatchcase(name, glob)]


def _overrides(base: Checkpoint, linear: Sequence[str], not_linear: Sequence[str]) -> dict[str, Part]:
    chosen: dict[str, Part] = {}
    for option, role, globs in (("--linear", "linear", linear), ("--not-linear", "other", not_linear)):
        for glob in globs:
            names = _matching(glob, base.tensors)
            if not names:
                raise UsageError(f"{option} {glob} matches no tensor of {base.source}: check the spelling")
            for name in names:
                info = base.tensors[name]
                if role == "linear" and not (info.is_float and len(info.shape) in (2, 3)):
                    raise UsageError(
                        f"--linear {glob} matches {name}, a {info.dtype} tensor of shape {list(info.shape)}, but "
                        "only floating tensors of 2 or 3 dimensions can be linear weights: narrow the glob"
                    )
                if name in chosen and chosen[name].role != role:
                    raise UsageError(
                        f"{name} is matched by both {chosen[name].rule} and {option} {glob}: narrow one of them"
                    )
                if info.is_float:
                    chosen[name] = Part("linear" if role == "linear" else "other", f"{option} {glob}")
    return chosen


# --- tied tensors -----------------------------------------------------------------------------------------


def _ties_of_architecture(base: Checkpoint, architecture: Architecture, parts: dict[str, Part]) -> list[Tie]:
    """Ties that the model makes, where the stored values agree; ``parts`` is told where they do not."""
    stored: dict[str | None, list[str]] = {}
    for name in parts:
        stored.setdefault(architecture.slot_of(name), []).append(name)
    ties: list[Tie] = []
    for group in architecture.ties:
        names = [stored[slot][0] for slot in group if len(stored.get(slot, ())) == 1]
        if not names:
            continue
        same = _classes_of_equal_bytes(base, names)
        if len(same) == 1:
            ties += [Tie(name, names[0], f"tied by {architecture.name} to") for name in names[1:]]
            embedding = next((slot for slot in group if architecture.slots[slot].kind == "embedding"), None)
            if embedding is not None and not any(parts[name].role == "embedding" for name in names):
                parts[names[0]] = Part("embedding", f"tied by {architecture.name} to {embedding}")
        else:
            for name in names:
                remark = f" ({architecture.name} ties it, but the stored values differ)"
                parts[name] = replace(parts[name], rule=parts[name].rule + remark)
            ties += [Tie(n, c[0], f"tied by {architecture.name} to") for c in same for n in c[1:]]
    return ties


def _ties_by_bytes(base: Checkpoint, parts: dict[str, Part]) -> list[Tie]:
    """Matrices equal to an embedding. Equal linear weights are no tie: deepened models repeat layers."""
    matrices = [name for name, part in parts.items() if part.role in ("linear", "embedding")]
    ties: list[Tie] = []
    by_form: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name in matrices:
        info = base.tensors[name]
        by_form.setdefault((info.dtype, info.shape), []).append(name)
    for names in by_form.values():
        if len(names) == 1 or not any(parts[name].role == "embedding" for name in names):
            continue
        for same in _classes_of_equal_bytes(base, names):
            embeddings = [name for name in same if parts[name].role == "embedding"]
            if embeddings and not _is_constant(base, same[0]):
                ties += [Tie(n, embeddings[0], "same bytes as") for n in same if n != embeddings[0]]
    return ties


def _classes_of_equal_bytes(base: Checkpoint, names: Sequence[str]) -> list[list[str]]:
    """The names sorted into classes of equal dtype, shape and bytes; few rows tell most tensors apart."""
    if len(names) == 1:
        return [list(names)]
    classes: dict[Any, list[str]] = {}
    for name in names:
        info = base.tensors[name]
        classes.setdefault((info.dtype, info.shape, tensor_digest(base.read(name)[:1])), []).append(name)
    equal: dict[Any, list[str]] = {}
    for key, candidates in classes.items():
        for name in candidates:
            digest = tensor_digest(base.read(name)) if len(candidates) > 1 else ""
            equal.setdefault((key, digest), []).append(name)
    return list(equal.values())


def _is_constant(base: Checkpoint, name: str) -> bool:
    values = base.read(name)
    return bool((values == values.reshape(-1)[:1]).all())


def _groups(ties: Iterable[Tie], order: Iterable[str]) -> list[dict[str, str]]:
    """Connected names, each with the reason why it is in its group, in the base's order."""
    groups: dict[str, dict[str, str]] = {}
    for tie in ties:
        joined = groups.get(tie.second, {tie.second: tie.reason})
        other = groups.get(tie.first, {tie.first: tie.reason})
        if joined is not other:
            joined |= other
            groups |= dict.fromkeys(joined, joined)
    rank = {name: position for position, name in enumerate(order)}
    unique = {id(group): group for group in groups.values()}.values()
    return [dict(sorted(group.items(), key=lambda item: rank[item[0]])) for group in unique]


def _tied(
    group: dict[str, str], parts: dict[str, Part], overrides: dict[str, Part], heads: dict[str, Part]
) -> dict[str, Part]:
    """One part for the whole group: what the user says of any member holds for all, for they are one."""
    chosen_heads = [name for name in group if name in heads]
    if 0 < len(chosen_heads) < len(group):
        merged = next(name for name in group if name not in heads)
        raise MergestreamError(
            f"{heads[chosen_heads[0]].rule} matches {chosen_heads[0]}, which is tied to {merged} that is merged: "
            "match both or neither"
        )
    said = {overrides[name].role: name for name in group if name in overrides}
    if len(said) > 1:
        raise UsageError(
            f"{said['linear']} is matched by --linear and {said['other']} by --not-linear, but they are tied: "
            "narrow one of them"
        )
    canonical = next((name for name in group if parts[name].role == "embedding"), next(iter(group)))
    result = {
        name: Part("tied", f"{reason} {canonical}", tied_to=canonical)
        for name, reason in group.items()
        if name != canonical
    }
    for override in said.values():
        result[canonical] = overrides[override]
    return result


def _canonical(name: str, parts: dict[str, Part]) -> str:
    return parts[name].tied_to or name


# --- names for a tied tensor that the base does not store --------------------------------------------------

_WORD_EMBEDDING = re.compile(
    r"(^|\.)(embed_tokens|wte|word_embeddings|shared|embed_in|tok_embeddings)\.weight$"
)
_KNOWN_ALIASES = (
    "lm_head.weight",
    "embed_out.weight",
    "cls.predictions.decoder.weight",
    "shared.weight",
    "encoder.embed_tokens.weight",
    "decoder.embed_tokens.weight",
)


def _known_spellings(name: str) -> list[str]:
    """The well-known names of a tensor tied to ``name``, at every level of the model that holds it."""
    pieces = name.split(".")
    prefixes = ["".join(f"{piece}." for piece in pieces[:depth]) for depth in range(len(pieces) - 1)]
    return [prefix + alias for prefix in prefixes for alias in _KNOWN_ALIASES if prefix + alias != name]


def _config_ties_embeddings(directory: Path | None) -> bool:
    if directory is None:
        return False
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        return bool(
            config.get("tie_word_embeddings", config.get("text_config", {}).get("tie_word_embeddings"))
        )
    except (OSError, ValueError, AttributeError):
        return False
