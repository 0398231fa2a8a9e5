"""Order tensor names, find the layer of a tensor, and recognise the names of adapters."""

from __future__ import annotations

import re
from collections.abc import Iterable

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


_ADAPTER = re.compile(r"lora|lycoris|\.(alpha|hada_|lokr_|oft_|diff|[ab][12]\.)")
_FACTOR = re.compile(r"lora[._](A|B|down|up|linear_layer|embedding_[AB])\b|hada_w|lokr_w|\boft_|on_input$|\.diff$")


def are_adapter_names(names: Iterable[str]) -> bool:
    """Whether all tensors of a file belong to a LoRA or to one of its variants."""
    found = False
    for name in names:
        if not _ADAPTER.search(name):
            return False
        found = found or bool(_FACTOR.search(name))
    return found
