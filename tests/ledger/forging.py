"""Entries of a ledger that somebody has changed, with digests that fit."""

from __future__ import annotations

import json
from collections.abc import Callable

from safetensors.torch import load_file, save_file
from torch import Tensor

from mergestream import Store
from mergestream.digest import combined_digest, tensor_digest, text_digest


def forge_entry(store: Store, number: int, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Change the tensors of the entry of an expert, and every digest on the way up to the manifest."""
    expert = store.history[number - 1]
    folder, manifest = store.path / "steps" / expert.folder, store.path / "manifest.json"
    tensors = {name: value.clone() for name, value in load_file(folder / "model.safetensors").items()}
    change(tensors)
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    digests = {name: tensor_digest(value) for name, value in tensors.items()}
    (folder / "digests.json").write_text(json.dumps(digests))
    content = json.loads(manifest.read_text())
    content.pop("digest")
    content["history"][number - 1]["state"] = combined_digest(digests)
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    manifest.write_text(json.dumps({**content, "digest": text_digest(text)}))
