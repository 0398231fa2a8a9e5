"""A routed export goes to the hub and is loaded from there."""

from __future__ import annotations

from pathlib import Path

import pytest

from mergestream import MergestreamError, RoutedModel
from mergestream.hub.transfer import push_model
from tests.hub.conftest import Hub
from tests.test_routed import home, texts  # noqa: F401


def test_a_routed_export_is_loaded_from_the_hub(hub: Hub, home: Path) -> None:  # noqa: F811
    push_model(home / "out", "org/served")
    assert "experts/cats/adapter_model.safetensors" in hub.files("org/served")
    hub.files("org/served")["optimizer.pt"] = b"never downloaded"
    here = RoutedModel.from_pretrained(home / "out")
    for name in ("org/served", "hf://org/served@main"):
        routed = RoutedModel.from_pretrained(name)
        assert routed.experts == here.experts and routed.threshold == here.threshold
        assert routed.route(texts("dogs", 1)) == here.route(texts("dogs", 1))
    with pytest.raises(MergestreamError, match="org/none is no directory here, and cannot be downloaded from the hub"):
        RoutedModel.from_pretrained("org/none")
