"""Forged stores: every field of every JSON file and every tensor of a step or of inputs is taken away or given a value
that nobody would write, with all digests made to fit. No command may answer with more than a sentence, or with NaN."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mergestream.digest import combined_digest, tensor_digest, text_digest
from tests.faults.cases import Case
from tests.faults.stores import Made, command, make_measured, make_stores

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


TENSORS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "gone": lambda x: None,
    "nan": lambda x: x.masked_fill(torch.arange(x.numel()).reshape(x.shape) == 0, math.nan),
    "infinite": lambda x: x + math.inf,
    "large": lambda x: x + torch.finfo(x.dtype).max / 2,
    "negative": lambda x: -x.abs() - 1,
    "zero": torch.zeros_like,
    "thousandfold": lambda x: 1000 * x,
    "reversed": lambda x: x.flip(0) if x.ndim else x,
    "repeated": lambda x: x[:1].expand_as(x) if x.ndim else x,
    "longer": lambda x: torch.cat([x, x]) if x.ndim else x.expand(2),
    "wider": lambda x: torch.cat([x, x], -1) if x.ndim else x.reshape(1, 1),
    "halves": lambda x: x.half(),
    "integers": lambda x: x.long(),
}


def cases(work: Path) -> Iterator[Case]:
    for made in (*make_stores(work), make_measured(work)):
        for file in _files(made.path):
            content = json.loads((made.path / file).read_text())
            for path in _paths(content):
                for kind in VALUES:
                    name = f"{made.path.name}/{file} {' '.join(map(str, path))}: {kind}"
                    yield Case(name, partial(_try, made, file, partial(_with_value, path=path, kind=kind)))
            for kind, change in TEXTS.items():
                yield Case(f"{made.path.name}/{file}: {kind}", partial(_try, made, file, change))
        for place in sorted(made.path.glob("*/0002/*.safetensors")):
            file = str(place.relative_to(made.path))
            for tensor, kind in product(load_file(place), TENSORS):
                act = partial(_with_tensor, file=file, name=tensor, kind=kind)
                yield Case(f"{made.path.name}/{file} {tensor}: {kind}", partial(_read, made, act))


def _files(store: Path) -> Iterator[str]:
    if (store / "inputs").exists():
        yield "inputs/0002/inputs.json"
        return
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


def _with_tensor(store: Path, file: str, name: str, kind: str) -> None:
    path = store / file
    tensors = load_file(path)
    changed = TENSORS[kind](tensors.pop(name))
    tensors |= {name: changed.contiguous()} if changed is not None else {}
    save_file(tensors, path)
    prefix = "" if path.stem in ("model", "moments", "heads") else f"{path.stem}/"
    found = {prefix + key: tensor_digest(value) for key, value in tensors.items()}
    folder, what = path.parent, {"inputs": "inputs.json", "experts": "tensors.json"}.get(file.partition("/")[0])
    index = folder / (what or "digests.json")
    content = json.loads(index.read_text())
    known = content["digests"] if what == "inputs.json" else content["heads"] if what else content
    known.pop(prefix + name)
    known |= found
    _seal(store, str(index.relative_to(store)), json.dumps(content))


def _try(made: Made, file: str, change: Callable[[str], str], place: Path) -> str | None:
    return _read(made, lambda store: _seal(store, file, change((store / file).read_text())), place)


def _read(made: Made, forge: Callable[[Path], None], place: Path) -> str | None:
    """Forge a copy of a store, and run every command that reads; what the first says that ends as it may not."""
    store = shutil.copytree(made.path, place / made.path.name)
    forge(store)
    for words in (
        ("status", store, "--tensors"),
        ("status", store, "--json"),
        ("log", store),
        ("log", store, "--json"),
        ("verify", store),
        ("export", store, place / "out"),
        ("export", store, place / "regress", "--readout", "regress"),
        ("export", store, place / "lora", "--format", "lora", "--rank", 2),
        ("inspect", store, made.third),
        ("report", store, "--format", "json"),
        ("report", store, "--format", "md"),
        ("diff", store, "1", "2"),
    ):
        outcome = command(*words)
        if outcome.fault:
            return f"{words[0]}: {outcome.fault}"
        if found := re.search(r".*\b(NaN(?! or Inf)|nan|Infinity)\b.*", outcome.out):
            return f"{words[0]} prints {found[0].strip()}"
    for path in place.glob("*/*.safetensors"):
        if not all(bool(x.isfinite().all()) for x in load_file(path).values()):
            return f"{path.parent.name} is not finite"
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
            _seal_expert(store, lambda expert: expert.update(record=text_digest(text)))
        elif path.name == "inputs.json":
            _seal_expert(store, lambda expert: expert["inputs"].update(record=text_digest(text)))
        elif path.name == "factors.json":
            digests = json.loads((path.parent / "digests.json").read_text())
            digests["factors.json"] = text_digest(json.dumps(content, sort_keys=True))
            _seal(store, "steps/0002/digests.json", json.dumps(digests))
        else:
            _seal_expert(store, lambda expert: expert.update(state=combined_digest(content)))
    except (ValueError, TypeError, AttributeError, RecursionError):
        pass  # what has no digest


def _seal_expert(store: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((store / "manifest.json").read_text())
    change(manifest["history"][-1])
    _seal(store, "manifest.json", json.dumps(manifest))
