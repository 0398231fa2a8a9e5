"""Progress bars: none by default, in a real notebook kernel below the cell, on a terminal in `tests/cli`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from mergestream.progress import NotebookProgress, Progress, default_progress
from tests.conftest import Toys, toy_base


def test_nothing_is_shown_outside_of_notebooks() -> None:
    assert type(default_progress()) is Progress


@pytest.mark.slow
def test_a_kernel_shows_bars(tmp_path: Path, toys: Toys) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    save_file(toy_base(), tmp_path / "base.safetensors")
    cells = [
        "import mergestream\n"
        "from mergestream.progress import default_progress\n"
        "store = mergestream.Store.create('store', base='base.safetensors')",
        f"store.add({str(toys.experts[0])!r}, name='legal')\nstore",
        "print(type(default_progress()).__name__)",
        "import time\n"
        "with default_progress().task('working <b>', 1000) as advance:\n"
        "    time.sleep(0.2)\n"
        "    advance(400)\n"
        "    raise KeyError('stop')",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    seen: list[str] = []

    class Client(nbclient.NotebookClient):  # type: ignore[name-defined,misc]
        def process_message(self, msg: Any, cell: Any, cell_index: Any) -> Any:
            content = msg["content"]
            seen.append(content.get("data", {}).get("text/html", ""))
            return super().process_message(msg, cell, cell_index)

    Client(notebook, resources={"metadata": {"path": tmp_path}}, allow_errors=True, timeout=120).execute()
    added, kind, failed = (cell["outputs"] for cell in notebook.cells[1:])
    assert any("reading the base" in html and "━" in html for html in seen)
    assert any("absorbing expert-1" in html for html in seen) and any("working &lt;b&gt;" in html for html in seen)
    assert any("0/1.0 kB" in html for html in seen) and any("0.4/1.0 kB" in html for html in seen), "it moves"
    assert "━" not in str(notebook), "a bar disappears when the work is done, or has failed"
    assert "1 expert merged by ledger" in added[-1]["data"]["text/plain"]
    assert kind[0]["text"].strip() == NotebookProgress.__name__ and failed[-1]["ename"] == "KeyError"
