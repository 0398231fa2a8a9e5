"""Order tensor names, and find the layer of a tensor."""

from __future__ import annotations

import re

_NUMBERED = re.compile(r"(?:^|.*?\.)\d+(?=\.|$)")


def natural(name: str) -> list[tuple[int, str]]:
    """A sort key that orders numbers in names by value: layer.2 before layer.10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def layer_of(tensor: str) -> str:
    """The layer of a tensor: ``encoder.layer.3`` of ``encoder.layer.3.attention.query.weight``.

    If no part of the name is a number, the module: ``pooler.dense`` of ``pooler.dense.bias``.
    """
    numbered = _NUMBERED.match(tensor)
    return numbered.group() if numbered else tensor.rpartition(".")[0] or tensor
