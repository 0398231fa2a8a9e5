"""A hub on this machine that can be written to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest

from tests.hub_server import COMMIT, TOKEN, Files, Uploads, serve


class Hub(Uploads):
    def __init__(self) -> None:
        super().__init__()
        self.repositories: dict[str, dict[str, Files]] = {}

    def files(self, name: str) -> Files:
        return self.repositories[name][COMMIT]


@pytest.fixture
def hub(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The package reads its settings when it is imported, so they are changed there; Xet needs a server of its own."""
    hub, home = Hub(), tmp_path_factory.mktemp("home")
    for variable in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with serve(hub.repositories, uploads=hub) as endpoint:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
        template = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(home / "token"))
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(home / "cache"))
        yield hub


def weights(directory: Path) -> int:
    """How many files go by LFS."""
    return sum(path.suffix in (".safetensors", ".png") for path in directory.rglob("*"))
