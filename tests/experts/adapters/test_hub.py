"""Adapters and bases by hub id, against the server of tests/checkpoints/test_hub.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints.test_hub import hub, run  # noqa: F401
from tests.handmade import handmade_adapter
from tests.hub_server import COMMIT

PROGRAM = """
import json, pathlib, sys
from mergestream import Store
from mergestream.base.model import open_base
base, adapter, place = sys.argv[1:]
store = Store.create(place, base, config_only=True)
entry = store.add(adapter)
fetched = sorted(path.name for path in pathlib.Path(place).parent.rglob("snapshots/*/*"))
store.export(place + "-full")
print(json.dumps({"base": store.manifest.base.source, "source": entry.source, "name": entry.name,
                  "fetched": fetched, "measured": store.manifest.base.measured}))
for config_only in (False, True):
    opened = open_base(base, config_only=config_only)
    print(json.dumps({"source": opened.source, "weights": opened.has_weights}))
"""


@pytest.fixture
def repositories(hub: Any, tmp_path: Path) -> Any:  # noqa: F811
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=24
    )
    transformers.LlamaForCausalLM(config).to(torch.float32).save_pretrained(tmp_path / "model")
    handmade_adapter(tmp_path / "adapter", 1, modules={"model.layers.0.self_attn.q_proj": (8, 8)})
    for name in ("model", "adapter"):
        files = {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        hub.repositories[f"org/{name}"] = {COMMIT: files}
    return hub


def test_weights_come_only_when_a_full_model_is_asked_for(repositories: Any, tmp_path: Path) -> None:
    home = tmp_path / "home"
    answer, full, bare = run(["org/model", "org/adapter", str(home / "store")], repositories.endpoint, home, PROGRAM)
    assert answer["base"] == f"org/model@{COMMIT}"
    assert answer["source"] == f"org/adapter@{COMMIT}"
    assert answer["name"] == "adapter"
    assert "config.json" in answer["fetched"]
    assert "adapter_model.safetensors" in answer["fetched"]
    assert "model.safetensors" not in answer["fetched"]
    assert not answer["measured"]
    assert json.loads((home / "store-full" / "config.json").read_text())["hidden_size"] == 8
    assert (home / "store-full" / "model.safetensors").is_file()
    # weights in the cache are no reason to take more than the configuration
    assert full == {"source": f"org/model@{COMMIT}", "weights": True}
    assert bare == {"source": f"org/model@{COMMIT}", "weights": False}
