"""States, entries of a ledger and statistics of inputs that somebody has changed, with digests that fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from mergestream import Store
from mergestream.digest import combined_digest, tensor_digest, text_digest


def forge_entry(store: Store, number: int, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of a step, the entry of an expert or a state, and every digest on the way up."""
    folder = store.path / "steps" / store.history[number - 1].folder
    digests = json.loads((folder / "digests.json").read_text())
    digests = {name: digest for name, digest in digests.items() if "/" in name or name == "factors.json"}
    digests |= _changed(folder / "model.safetensors", change)
    (folder / "digests.json").write_text(json.dumps(digests))
    _seal(store, number, lambda expert: expert.update(state=combined_digest(digests)))


def forge_inputs(store: Store, number: int, change: Callable[[dict[str, Tensor], dict[str, Any]], object]) -> None:
    """The same with the statistics of an expert's inputs, and what their index says."""
    entry = store.history[number - 1].inputs
    assert entry is not None
    folder = store.path / "inputs" / entry.folder
    index = json.loads((folder / "inputs.json").read_text())
    index["digests"] = _changed(folder / "moments.safetensors", lambda tensors: change(tensors, index))
    text = json.dumps(index)
    (folder / "inputs.json").write_text(text)
    _seal(store, number, lambda expert: expert["inputs"].update(record=text_digest(text)))


def _changed(path: Path, change: Callable[[dict[str, Tensor]], object]) -> dict[str, str]:
    """Change the tensors of a file; returns their digests."""
    tensors = {name: value.clone() for name, value in load_file(path).items()}
    change(tensors)
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    save_file(tensors, path)
    return {name: tensor_digest(value) for name, value in tensors.items()}


def _seal(store: Store, number: int, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = store.path / "manifest.json"
    content = json.loads(manifest.read_text())
    content.pop("digest")
    change(content["history"][number - 1])
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    manifest.write_text(json.dumps({**content, "digest": text_digest(text)}))
