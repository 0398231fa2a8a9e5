"""The role of each tensor of the base: linear weight, embedding, other, copied, head or tied.

If transformers knows the model in ``config.json``, its modules decide. For all other tensors, name and shape decide.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal

from mergestream.base.architecture import Architecture
from mergestream.digest import tensor_digest
from mergestream.errors import UsageError

if TYPE_CHECKING:
    from mergestream.checkpoints import Checkpoint, TensorInfo

Role = Literal["linear", "embedding", "other", "copied", "head", "tied"]


@dataclass(frozen=True)
class TensorRole:
    """A tensor's role. A ``linear`` tensor of three dimensions is one matrix per index of the first."""

    role: Role
    rule: str
    """The reason, for the user"""
    tied_to: str | None = None
    module: str | None = None
    """The class of the module whose weight it is (``torch.nn.Conv2d``, ``Conv1D``), if the architecture is known"""


Tie = tuple[str, str, str]
"""Two names of one tensor, and the reason, which is printed before the name of the other tensor"""


def find_roles(
    base: Checkpoint,
    architecture: Architecture,
    *,
    linear: Sequence[str] = (),
    not_linear: Sequence[str] = (),
    heads: Sequence[str] = (),
) -> dict[str, TensorRole]:
    """Find the role of every tensor of the base, in the base's order.

    The globs ``linear`` and ``not_linear`` override what is found; tensors that match one of ``heads`` are kept per
    expert. Of tied tensors, the embedding or else the first one has the role, and the others are ``tied`` to it.
    """
    found = {name: _find_role(name, info, architecture) for name, info in base.tensors.items()}
    ties: list[Tie] = [(name, target, "shares storage with") for name, target in base.aliases.items()]
    ties += _ties_of_architecture(base, found, architecture)
    ties += _ties_by_bytes(base, found, architecture)
    chosen = _apply_options(base, found, linear, not_linear, heads)
    roles = found | chosen
    for group in _groups([tie for tie in ties if found[tie[0]].role != "copied"], found):
        roles |= _tied(group, found, chosen)
    return roles


def tied_names(architecture: Architecture, roles: Mapping[str, TensorRole]) -> dict[str, str]:
    """Names that an expert may store and the base does not, each with the tensor of the base to which it is tied."""
    slots = architecture.slots
    stored = {architecture.slot_of(name): role.tied_to or name for name, role in roles.items()}
    names: dict[str, str] = {}
    for group in architecture.ties:
        present = {stored[slot]: slots[slot].kind for slot in group if slot in stored}
        for slot in set(group) - stored.keys():
            # If head and embedding are stored with different values, the absent name is of its own kind.
            like = [name for name, kind in present.items() if len(present) == 1 or kind == slots[slot].kind]
            names |= {slot: like[0]} if len(like) == 1 else {}
    return dict(sorted(names.items()))


def model_names(base: Checkpoint, architecture: Architecture) -> dict[str, str]:
    """Map the names in the model's class to the stored names, where the two differ.

    Several stored tensors may become one tensor of the class, such as a stack of experts; then there is no such name.
    """
    return {slot: name for slot, name in _stored_names(base, architecture).items() if slot != name}


def _stored_names(base: Checkpoint, architecture: Architecture) -> dict[str, str]:
    """The stored name of each slot that one stored tensor fills."""
    names: dict[str, list[str]] = {}
    for name in base.tensors:
        names.setdefault(architecture.slot_of(name) or "", []).append(name)
    return {slot: found[0] for slot, found in names.items() if slot and len(found) == 1}


# --- one tensor -------------------------------------------------------------------------------------------

# The name of a weight's module is the last component of its path that is no number.
_EMBEDDING = re.compile(
    r"^(?!patch_)("  # patches are projected, not looked up
    r"wte|wpe|shared|codebook|embed_(?!out$).*"  # embed_out is GPT-NeoX's head
    r"|(.*_)?emb(s|ed|eds|edding|eddings)?(_table|_layers?|_\d+)?"
    r"|.*relative_(attention|position)_bias.*"
    r")$"
)
_NORM = re.compile(r"norm|(^|_)(ln|bn)(_|\d|$)", re.IGNORECASE)
_EXPERTS = re.compile(r"expert|(^|[._])moe([._]|$)", re.IGNORECASE)


def _find_role(name: str, info: TensorInfo, architecture: Architecture) -> TensorRole:
    if not info.is_float:
        return TensorRole("copied", f"{'boolean' if info.dtype == 'BOOL' else 'integer'} tensor")
    ndim = len(info.shape)
    slot = architecture.slots.get(architecture.slot_of(name) or "")
    if slot is None:
        return _by_rule(name, ndim, f"not in {architecture.name}" if architecture.name else architecture.unknown)
    rule = f"{slot.owner} in {architecture.name}"
    if slot.kind == "custom" and ndim == 3 and _EXPERTS.search(slot.owner):
        role = TensorRole("linear", f"3-D, {rule}")
    elif slot.kind == "custom" or (slot.kind == "linear" and ndim != 2):
        role = _by_rule(name, ndim, rule)  # a convolution that became a linear layer is not stored as a matrix
    else:
        role = TensorRole(slot.kind, rule)
    return replace(role, module=slot.module)


def _by_rule(name: str, ndim: int, note: str) -> TensorRole:
    """Decide by name and number of dimensions; ``note`` says why the architecture does not."""
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


# --- options of the user ----------------------------------------------------------------------------------


def _apply_options(
    base: Checkpoint,
    found: Mapping[str, TensorRole],
    linear: Sequence[str],
    not_linear: Sequence[str],
    heads: Sequence[str],
) -> dict[str, TensorRole]:
    """The roles that the user's globs choose; heads take precedence."""
    globs: list[tuple[str, Role, str]] = [
        *(("--linear", "linear", glob) for glob in linear),
        *(("--not-linear", "other", glob) for glob in not_linear),
        *(("--heads", "head", glob) for glob in heads),
    ]
    chosen: dict[str, TensorRole] = {}
    for option, role, glob in globs:
        names = [name for name in base.tensors if fnmatchcase(name, glob)]
        if not names and role != "head":  # a head may be in the experts only
            raise UsageError(f"{option} {glob} matches no tensor of {base.source}: check the spelling")
        for name in names:
            info, new = base.tensors[name], replace(found[name], role=role, rule=f"{option} {glob}")
            if role == "linear" and not (info.is_float and len(info.shape) in (2, 3)):
                raise UsageError(
                    f"{new.rule} matches {name} ({info.dtype}, shape {list(info.shape)}); only floating tensors of 2 "
                    "or 3 dimensions can be linear weights: narrow the glob"
                )
            if role == "other" and chosen.get(name, new).role != role:
                raise UsageError(f"{name} is matched by both {chosen[name].rule} and {new.rule}: narrow one of them")
            if info.is_float or role == "head":  # integers are always copied
                chosen[name] = new
    return chosen


# --- tied tensors -----------------------------------------------------------------------------------------


def _ties_of_architecture(base: Checkpoint, found: dict[str, TensorRole], architecture: Architecture) -> list[Tie]:
    """Ties of the model's class whose stored values agree; if they do not, the rules in ``found`` say so."""
    stored, ties = _stored_names(base, architecture), list[Tie]()
    for group in architecture.ties:
        names = [stored[slot] for slot in group if slot in stored]
        classes = _classes_of_equal_bytes(base, names)
        for same in classes:
            ties += [(name, same[0], f"tied by {architecture.name} to") for name in same[1:]]
        if len(classes) > 1:
            note = f" ({architecture.name} ties it, but the stored values differ)"
            found |= {name: replace(found[name], rule=found[name].rule + note) for name in names}
        elif names and all(found[name].role == "linear" for name in names):
            # Only the head is stored; it counts as the embedding that it is tied to.
            embeddings = [slot for slot in group if architecture.slots[slot].kind == "embedding"]
            if embeddings:
                rule = f"tied by {architecture.name} to {embeddings[0]}"
                found[names[0]] = replace(found[names[0]], role="embedding", rule=rule)
    return ties


def _ties_by_bytes(base: Checkpoint, found: dict[str, TensorRole], architecture: Architecture) -> list[Tie]:
    """Matrices equal to an embedding, unless the architecture knows both and decides.

    Equal linear weights are no tie, because deepened models repeat layers. Constants are no tie, because two
    embeddings may both start at zero.
    """
    shapes = {name: base.tensors[name].shape for name, role in found.items() if role.role in ("linear", "embedding")}
    embeddings = {name: shape for name, shape in shapes.items() if found[name].role == "embedding"}
    alike = [name for name, shape in shapes.items() if shape in embeddings.values()]
    unknown = {name for name in alike if not architecture.slot_of(name)}
    ties: list[Tie] = []
    for same in _classes_of_equal_bytes(base, alike) if unknown else ():
        embedding = next((name for name in same if name in embeddings), None)
        if embedding is None or len(same) == 1:
            continue
        values = base.read(embedding)
        if values.numel() and values.min() != values.max():
            others = [name for name in same if name != embedding and not unknown.isdisjoint((name, embedding))]
            ties += [(name, embedding, "same bytes as") for name in others]
    return ties


def _classes_of_equal_bytes(base: Checkpoint, names: Sequence[str]) -> list[list[str]]:
    """Group names by equal dtype, shape and bytes."""
    equal: dict[str, list[str]] = {}
    for name in names:
        equal.setdefault(tensor_digest(base.read(name)) if len(names) > 1 else "", []).append(name)
    return list(equal.values())


def _groups(ties: Iterable[Tie], order: Iterable[str]) -> list[dict[str, str]]:
    """Join ties into groups, in the base's order; each name has the reason why it is in its group."""
    groups: dict[str, dict[str, str]] = {}
    for first, second, reason in ties:
        joined = groups.get(second, {second: reason}) | groups.get(first, {first: reason})
        groups |= dict.fromkeys(joined, joined)
    unique = {id(group): group for group in groups.values()}.values()
    return [{name: group[name] for name in order if name in group} for group in unique]


def _tied(
    group: Mapping[str, str], found: Mapping[str, TensorRole], chosen: Mapping[str, TensorRole]
) -> dict[str, TensorRole]:
    """The roles of a group of tied tensors; an option that matches one of them holds for all."""
    options = {chosen[name].role if name in chosen else None: name for name in group}
    if options.keys() == {"head"}:
        return {}
    if "head" not in options:
        options.pop(None, None)
    if len(options) > 1:
        matches = (
            f"{name} is matched by {chosen[name].rule if name in chosen else 'none'}" for name in options.values()
        )
        raise UsageError(f"{', '.join(matches)}, but they are tied: match all of them by one option, or none")
    canonical = next((name for name in group if found[name].role == "embedding"), next(iter(group)))
    roles = {
        name: replace(found[name], role="tied", rule=f"{reason} {canonical}", tied_to=canonical)
        for name, reason in group.items()
    }
    decided = next((chosen[name] for name in group if name in chosen), found[canonical])
    roles[canonical] = replace(found[canonical], role=decided.role, rule=decided.rule)
    return roles
