"""OPCM prints λ, which divides; all other methods print the scale, which multiplies."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mergestream.methods.scale import displayed_scale
from tests.conftest import RunCommand, Toys


def outputs(done: Any, place: Path, toys: Toys, method: str) -> tuple[str, str, list[dict[str, float]]]:
    """Returns all text about two experts, the HTML report, and the scales from JSON."""
    store, merged, text = place / "store", place / "merged", []
    done("init", store, "--base", toys.base, "--method", method)
    text.append(done("add", store, *toys.experts[:2]))
    text += [done(command, store) for command in ("status", "log")]
    text += [done("inspect", store, toys.experts[2]), done("report", store, "--format", "md")]
    done("export", store, merged)
    text.append((merged / "README.md").read_text(encoding="utf-8"))
    page = done("report", store, "-o", place / "page.html") + (place / "page.html").read_text(encoding="utf-8")
    scales = [
        json.loads(done("status", store, "--json")),
        json.loads(done("log", store, "--json"))[-1],
        json.loads(done("report", store, "--format", "json"))["experts"][-1],
        json.loads(done("inspect", store, toys.experts[2], "--json")),
    ]
    return "\n".join(text), page.split("<script>", 1)[0], scales


@pytest.mark.parametrize(("method", "scale"), [("task_arithmetic", 0.3), ("average", 0.5), ("magmax", 0.5)])
def test_other_methods_print_a_scale(
    method: str, scale: float, tmp_path: Path, toys: Toys, done: Callable[..., str]
) -> None:
    text, page, (status, log, report, inspection) = outputs(done, tmp_path, toys, method)
    assert "λ" not in text and "λ" not in page
    assert f"  scale {scale}  " in text and f"scale {scale}   mean ‖Δ‖ " in text
    assert (
        f"* Scale {scale};" in text
        and "| scale |" in text
        and re.search(rf'data-label="scale" data-sort="[^"]*">\s*{scale}\s*<', page)
    )
    for found in (status, log, report):
        assert found["scale"] == scale and found["lambda"] == 1 / scale
    assert inspection["scale"] == pytest.approx(1 / 3 if method == "average" else scale)


def test_opcm_prints_lambda(tmp_path: Path, toys: Toys, done: Callable[..., str]) -> None:
    text, page, scales = outputs(done, tmp_path, toys, "opcm")
    value = scales[0]["lambda"]
    assert f"λ {value:.6g}   mean ‖Δ‖" in text and f"= 1/λ, λ = {value:.6g};" in text
    assert "| λ | ‖merged − base‖ |" in text
    assert '<td data-label="λ"' in page
    assert all(found["lambda"] == pytest.approx(1 / found["scale"]) for found in scales)


def test_only_opcm_mentions_lambda(done: Callable[..., str]) -> None:
    methods = json.loads(done("methods", "--json"))
    assert ["λ" in json.dumps(method, ensure_ascii=False) for method in methods] == [
        method["name"] == "opcm" for method in methods
    ]
    assert displayed_scale("opcm", 0.5) == ("λ", 2.0) and displayed_scale("task_arithmetic", 0.5) == ("scale", 0.5)


def test_gates_accept_scale_and_lambda(
    tmp_path: Path, toys: Toys, done: Callable[..., str], mergestream: RunCommand
) -> None:
    done("init", tmp_path / "store", "--base", toys.base, "--method", "task_arithmetic")
    done("add", tmp_path / "store", toys.experts[0], "--gate", "scale<=0.3", "--gate", "lambda>=3")
    refused = mergestream("add", tmp_path / "store", toys.experts[1], "--gate", "scale>0.3")
    assert refused.code == 4 and "the scale of the merged task vector after the step is 0.3" in refused.err
