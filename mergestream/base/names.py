"""What the name of a tensor tells: its layer, and its place among others."""

from __future__ import annotations

import re

_NUMBERED = re.compile(r"(?:^|.*?\.)\d+(?=\.|$)")


def natural(name: str) -> list[tuple[int, str]]:
    """Numbers in a name by their value: layer.2 before layer.10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def layer_of(tensor: str) -> str:
    """The layer that a tensor belongs to: ``encoder.layer.3`` of ``encoder.layer.3.attention.query.weight``.

    Where no part of the name is a number, the module: ``pooler.dense`` of ``pooler.dense.bias``.
    """
    numbered = _NUMBERED.match(tensor)
    return numbered.group() if numbered else tensor.rpartition(".")[0] or tensor
