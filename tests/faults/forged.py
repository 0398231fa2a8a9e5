"""Forged stores: every field of every file of ours is taken away or given a value that nobody would write, with all
digests made to fit. No command may answer with more than a sentence."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from mergestream.digest import combined_digest, text_digest
from tests.faults.cases import Case
from tests.faults.stores import Made, command, make_stores

MANY = 40
GONE = object()
VALUES: dict[str, Any] = {
    "gone": GONE,
    "null": None,
    "text": "x",
    "true": True,
    "negative": -1,
    "fraction": 0.5,
    "huge": 10**18,
    "long": 10**400,
    "large": 1e308,
    "nan": math.nan,
    "infinite": math.inf,
    "list": [],
    "nested": [[[[1]]]],
    "table": {},
}
TEXTS: dict[str, Callable[[str], str]] = {
    "empty": lambda text: "",
    "cut": lambda text: text[: len(text) // 2],
    "a list": lambda text: f"[{text}]",
    "twice": lambda text: '{"x": 1, "x": 1, ' + text[1:],
    "surrogate": lambda text: '{"\\ud800": 1, ' + text[1:],
    "deep": lambda text: '{"deep": ' + "[" * 100_000 + "]" * 100_000 + ", " + text[1:],
    "less deep": lambda text: '{"deep": ' + "[" * 400 + "]" * 400 + ", " + text[1:],
    "digits": lambda text: '{"digits": ' + "9" * 6000 + ", " + text[1:],
}


def cases(work: Path) -> Iterator[Case]:
    for made in make_stores(work):
        for file in _files(made.path):
            content = json.loads((made.path / file).read_text())
            for path in _paths(content):
                for kind in VALUES:
                    name = f"{made.path.name}/{file} {' '.join(map(str, path))}: {kind}"
                    yield Case(name, partial(_try, made, file, partial(_with_value, path=path, kind=kind)))
            for kind, change in TEXTS.items():
                yield Case(f"{made.path.name}/{file}: {kind}", partial(_try, made, file, change))


def _files(store: Path) -> Iterator[str]:
    yield from ("manifest.json", "scores.json", "experts/0002/tensors.json", "steps/0002/digests.json")
    if (store / "steps/0002/factors.json").exists():
        yield "steps/0002/factors.json"


def _paths(content: Any, above: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Where every value is; of many tensors every third will do."""
    if isinstance(content, list):
        content = dict(enumerate(content))
    items = list(content.items()) if isinstance(content, dict) else []
    for key, value in items[:: 3 if above[-1:] == ("tensors",) or len(items) > MANY else 1]:
        yield (*above, key)
        yield from _paths(value, (*above, key))


def _with_value(text: str, path: tuple[str | int, ...], kind: str) -> str:
    content = parent = json.loads(text)
    for key in path[:-1]:
        parent = parent[key]
    if VALUES[kind] is GONE:
        del parent[path[-1]]
    else:
        parent[path[-1]] = VALUES[kind]
    return json.dumps(content, ensure_ascii=False)


def _try(made: Made, file: str, change: Callable[[str], str], place: Path) -> str | None:
    """Forge a copy of a store, and run every command that reads; what the first says that ends as it may not."""
    store = shutil.copytree(made.path, place / made.path.name)
    _seal(store, file, change((store / file).read_text()))
    for words in (
        ("status", store, "--tensors"),
        ("status", store, "--json"),
        ("log", store),
        ("log", store, "--json"),
        ("verify", store),
        ("export", store, place / "out"),
        ("export", store, place / "lora", "--format", "lora", "--rank", 2),
        ("inspect", store, made.third),
        ("report", store, "--format", "json"),
        ("report", store, "--format", "md"),
        ("diff", store, "1", "2"),
    ):
        if fault := command(*words).fault:
            return f"{words[0]}: {fault}"
    return None


def _seal(store: Path, file: str, text: str) -> None:
    """Write a file, and its digest where that is kept, and so on."""
    path = store / file
    path.write_text(text)
    try:
        content = json.loads(text)
        if file in ("manifest.json", "scores.json"):
            content.pop("digest", None)
            form: dict[str, Any] = {"separators": (",", ":"), "ensure_ascii": False} if file == "manifest.json" else {}
            digest = text_digest(json.dumps(content, sort_keys=True, **form))
            path.write_text(json.dumps({**content, "digest": digest}))
        elif path.name == "tensors.json":
            _seal_expert(store, "record", text_digest(text))
        elif path.name == "factors.json":
            digests = json.loads((path.parent / "digests.json").read_text())
            digests["factors.json"] = text_digest(json.dumps(content, sort_keys=True))
            _seal(store, "steps/0002/digests.json", json.dumps(digests))
        else:
            _seal_expert(store, "state", combined_digest(content))
    except (ValueError, TypeError, AttributeError, RecursionError):
        pass  # what has no digest


def _seal_expert(store: Path, what: str, digest: str) -> None:
    manifest = json.loads((store / "manifest.json").read_text())
    manifest["history"][-1][what] = digest
    _seal(store, "manifest.json", json.dumps(manifest))
