"""Inputs of strangers: every parser of checkpoints, indexes, configurations, adapters and pickles, fed with faults.

`case(seed)` writes one of them, `known()` those that once did harm, and `swallow` gives one to everything that would
read it. It must end soon, with a `MergestreamError` or nothing at all: `fault` says what else has happened.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import struct
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

from mergestream.base.model import BaseModel, open_base
from mergestream.checkpoints import Checkpoint, open_checkpoint
from mergestream.checkpoints.layout import companions
from mergestream.engine import LocalEngine
from mergestream.errors import MergestreamError
from mergestream.experts import make_task_vector, open_expert
from tests.gguf_files import write_gguf

SECONDS = 20.0
"""That any input may take, on a machine that does other things as well"""
MODULE = "model.layers.0.self_attn.q_proj"
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 40,
}
ADAPTER = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "rank_pattern": {}}


@dataclass(frozen=True)
class Case:
    """One input: ``write`` puts it into an empty directory and returns what a user would name."""

    label: str
    write: Callable[[Path], Path]
    read: Callable[[Path], object] = lambda path: swallow(path)


def fault(case: Case, place: Path) -> str | None:
    """What is wrong with the way in which a case is taken, if anything; ``place`` is an empty directory."""
    _warm_up()
    inside, canary = place / "input", place / "canary"
    inside.mkdir()
    canary.write_text("sings")
    path = case.write(inside)
    started = time.monotonic()
    try:
        case.read(path)
    except MergestreamError as error:
        if not str(error):
            return "it is refused without a word"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if time.monotonic() - started > SECONDS:
        return "it takes too long"
    if sorted(path.name for path in place.iterdir()) != ["canary", "input"] or canary.read_text() != "sings":
        return "it has reached outside"
    return None


def swallow(path: Path) -> None:
    """Read an input in all the ways in which commands do: as a base, as an expert, as files to copy."""
    model, base = _base()
    if path.is_dir():
        for companion in companions(path):
            companion.read_bytes()
        if (path / "config.json").exists():
            with open_base(path, config_only=True) as opened:
                BaseModel.examine(opened, measure=opened.has_weights, engine=LocalEngine(1))
    expert = open_expert(path)
    try:
        vector = make_task_vector(model, base, expert, partial=True)
        for name in vector.names:
            for _ in vector.pieces(name):
                pass
        if isinstance(expert, Checkpoint):
            BaseModel.examine(expert, engine=LocalEngine(1))
    finally:
        expert.close()


@cache
def _warm_up() -> None:
    """What is imported late must not count."""
    with suppress(ImportError):
        getattr(import_module("transformers"), LLAMA["architectures"][0])
    _base()


@cache
def _base() -> tuple[BaseModel, Checkpoint]:
    base = open_checkpoint({f"{MODULE}.weight": torch.ones(4, 6), "norm.weight": torch.ones(4)})
    return BaseModel.examine(base, engine=LocalEngine(1)), base


# --- pieces of inputs -------------------------------------------------------------------------------------


def nasty(draw: random.Random, depth: int = 2) -> Any:
    """A JSON value that nobody expects."""
    plain: list[Any] = [
        None, True, False, 0, 1, -1, 2, 10**400, -(2**63), 2**40, 2**60, 2**64, 0.5, -0.0, 1e308, float("inf"),
        float("nan"), "", "x", "../x", "/etc/passwd", "a\0b", "\ud800", "\x1b[31m", "\n", "é" * 300, "F32",
        "(a+)+$", "(?i)a", "a{99999999999}", "[", "__class__", "model.safetensors", "BF16", "F8_E4M3", [], {},
    ]  # fmt: skip
    if depth and draw.random() < 0.3:
        values = [nasty(draw, depth - 1) for _ in range(draw.randrange(4))]
        return values if draw.random() < 0.5 else {str(nasty(draw, 0)): value for value in values}
    return draw.choice(plain)


def deep(levels: int) -> str:
    return "[" * levels + "]" * levels


def scarred(draw: random.Random, data: bytes) -> bytes:
    """With bytes changed, cut out or put in."""
    scars = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(scars) + 1)
        kind = draw.randrange(4)
        if kind == 0 and at < len(scars):
            scars[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del scars[at : at + draw.choice((1, 8, 100))]
        elif kind == 2:
            scars[at:at] = draw.randbytes(draw.choice((1, 8, 100)))
        else:
            del scars[at:]
    return bytes(scars)


def disturbed(draw: random.Random, table: dict[str, Any]) -> dict[str, Any]:
    """With some fields made nasty, removed or added."""
    table = dict(table)
    for _ in range(draw.randint(1, 3)):
        key = draw.choice([*table, "extra"])
        if draw.random() < 0.15:
            table.pop(key, None)
        else:
            table[key] = nasty(draw)
    return table


def deeply_disturbed(draw: random.Random, content: Any) -> Any:
    """With a field made nasty, at any depth."""
    if isinstance(content, dict) and content:
        if draw.random() < 0.3:
            return disturbed(draw, content)
        key = draw.choice(list(content))
        return {**content, key: deeply_disturbed(draw, content[key])}
    if isinstance(content, list) and content:
        place = draw.randrange(len(content))
        return [*content[:place], deeply_disturbed(draw, content[place]), *content[place + 1 :]]
    return nasty(draw)


def to_json(draw: random.Random, content: Any) -> str:
    text = json.dumps(content)
    return text.replace("null", deep(3000), 1) if draw.random() < 0.1 else text


def weights() -> bytes:
    return save({f"{MODULE}.weight": torch.ones(4, 6), "norm.weight": torch.ones(4)})


def factors() -> bytes:
    prefix = f"base_model.model.{MODULE}.lora_"
    return save({f"{prefix}A.weight": torch.ones(2, 6), f"{prefix}B.weight": torch.ones(4, 2)})


def safetensors(header: str | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    header = header.encode("utf-8", "surrogatepass") if isinstance(header, str) else header
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def torch_file(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def with_pickle(data: bytes, compression: int = zipfile.ZIP_STORED) -> bytes:
    """A file of torch.save with another pickle in it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", "3\n")
    return buffer.getvalue()


@cache
def gguf_bytes() -> bytes:
    with tempfile.TemporaryDirectory() as place:
        write_gguf(Path(place) / "model.gguf")
        return (Path(place) / "model.gguf").read_bytes()


class Evil:
    """What a pickle calls when it is loaded by one who trusts it."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


# --- kinds of inputs --------------------------------------------------------------------------------------


def _put_adapter(place: Path, config: str) -> Path:
    return _put(place, adapter_config__json=config, adapter_model__safetensors=factors())


def _put(place: Path, **files: bytes | str) -> Path:
    for name, content in files.items():
        path = place / name.replace("__", ".")
        path.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
    return place


def _header(draw: random.Random, place: Path) -> Path:
    whole = weights()
    length = struct.unpack("<Q", whole[:8])[0]
    header, data = json.loads(whole[8 : 8 + length]), whole[8 + length :]
    kind = draw.randrange(5)
    if kind == 0:
        return _put(place, model__safetensors=scarred(draw, whole))
    if kind == 1:
        claimed = draw.choice((0, 7, length + 1, 2**31, 2**63, 2**64 - 1))
        return _put(place, model__safetensors=safetensors(json.dumps(header), data, claimed))
    name = draw.choice(list(header))
    if kind == 2:
        header[name] = disturbed(draw, header[name])
    elif kind == 3:
        header[str(nasty(draw, 0))] = draw.choice([header[name], nasty(draw)])
    else:
        shape = [draw.choice((0, 1, 2, 2**20, 2**40, 2**59)) for _ in range(draw.choice((1, 3, 70)))]
        begin, end = sorted(draw.randrange(200) for _ in range(2))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": draw.choice(([begin, end], [end, begin]))}
    return _put(place, model__safetensors=safetensors(to_json(draw, header), data))


def _index(draw: random.Random, place: Path) -> Path:
    names = (
        "a.safetensors",
        "../input.safetensors",
        "/tmp/a.safetensors",
        "b.safetensors",
        "a\\b.safetensors",
        "..",
        "é",
    )
    outside = place.parent / "input.safetensors"
    table: dict[str, Any] = {f"{MODULE}.weight": "a.safetensors", "norm.weight": "a.safetensors"}
    for _ in range(draw.randint(1, 3)):
        table[draw.choice([*table, str(nasty(draw, 0))])] = draw.choice([*names, nasty(draw)])
    if draw.random() < 0.2:
        (place / "b.safetensors").symlink_to(outside)
    content = draw.choice([{"weight_map": table}, disturbed(draw, {"weight_map": table, "metadata": {}})])
    return _put(place, a__safetensors=weights(), model__safetensors__index__json=to_json(draw, content))


def _config(draw: random.Random, place: Path) -> Path:
    config: dict[str, Any] = dict(LLAMA)
    for _ in range(draw.randint(1, 3)):
        config[draw.choice([*LLAMA, "auto_map", "dtype", "quantization_config", "text_config"])] = nasty(draw)
    if draw.random() < 0.3:
        config |= {"auto_map": {"AutoModel": "evil.Model"}, "trust_remote_code": True, "architectures": ["Model"]}
    _put(place, evil__py=f"open({str(place.parent / 'outside')!r}, 'w')", config__json=to_json(draw, config))
    return _put(place, model__safetensors=weights()) if draw.random() < 0.5 else place


def _adapter(draw: random.Random, place: Path) -> Path:
    config: dict[str, Any] = dict(ADAPTER)
    table = {draw.choice(("q_proj", "(a+)+$", "(.*)*x", str(nasty(draw, 0)))): draw.choice((2, 3, nasty(draw, 0)))}
    config[draw.choice(("rank_pattern", "alpha_pattern"))] = table
    config = disturbed(draw, config) if draw.random() < 0.7 else config
    data = scarred(draw, factors()) if draw.random() < 0.4 else factors()
    return _put(place, adapter_config__json=to_json(draw, config), adapter_model__safetensors=data)


def _pickle(draw: random.Random, place: Path) -> Path:
    outside = str(place.parent / "outside")
    tensor = torch.ones(4)
    state: dict[Any, Any] = {"norm.weight": tensor, f"{MODULE}.weight": torch.ones(4, 6)}
    kind = draw.randrange(7)
    if kind == 0:
        return _put(place, pytorch_model__bin=scarred(draw, torch_file(state)))
    if kind == 1:
        evil = draw.choice(
            [Evil(os.mkdir, outside), Evil(os.system, f"touch {outside}"), Evil(eval, "1"), Evil(open, outside, "w")]
        )
        data = pickle.dumps({"norm.weight": evil}, draw.randrange(5))
        return _put(place, pytorch_model__bin=draw.choice([with_pickle(data), data, with_pickle(scarred(draw, data))]))
    if kind == 2:
        state[draw.choice((1, None, ("a",), "\ud800", "a\0b", "", "x" * 10_000))] = tensor
    elif kind == 3:
        odd = [
            tensor.expand(2**40, 4),
            torch.ones(9).as_strided((9, 3), (1, 0)),
            torch.ones(2, 2).to_sparse(),
            tensor.to("meta"),
            torch.ones(2, dtype=torch.complex64),
            torch.zeros(0, 2**40),
            torch.ones(4, 6).T,
            tensor[::2],
        ]
        state["odd"] = draw.choice(odd)
    elif kind == 4:
        wrapper = draw.choice(("state_dict", "model", "module", "optimizer"))
        state = {wrapper: draw.choice([state, nasty(draw), [state]])}
    elif kind == 5:
        inner: Any = state
        for _ in range(draw.choice((2, 20, 2000))):
            inner = {"state_dict": inner}
        try:
            return _put(place, pytorch_model__bin=torch_file(inner))
        except RecursionError:
            return _put(place, pytorch_model__bin=torch_file(state))
    else:
        return _put(place, pytorch_model__bin=with_pickle(draw.randbytes(draw.randrange(60))))
    return _put(place, pytorch_model__bin=torch_file(state))


def _distributed(draw: random.Random, place: Path) -> Path:
    """Chunks and their metadata, of which one or the other is not what torch has written."""
    outside, key = str(place.parent / "outside"), f"{MODULE}.weight"
    chunk = torch_file(torch.ones(4, 6))
    described = metadata.TensorStorageMetadata(metadata.TensorProperties(torch.float32), torch.Size((4, 6)), [])
    described.chunks = [metadata.ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((4, 6)))]
    info = _StorageInfo("__0_0.distcp", 0, len(chunk))
    whole = metadata.Metadata({key: described}, {key: (key,)}, {metadata.MetadataIndex(key, (0, 0)): info})
    evil = draw.choice([Evil(os.mkdir, outside), Evil(os.system, f"touch {outside}"), Evil(open, outside, "w")])
    kind = draw.randrange(6)
    if kind == 5:  # parts that overlap, leave gaps, or are cut along many dimensions
        described.chunks = []
        for _ in range(draw.randrange(5)):
            offsets = torch.Size((draw.randrange(4), draw.randrange(6)))
            sizes = torch.Size((draw.randrange(5), draw.randrange(7)))
            described.chunks.append(metadata.ChunkStorageMetadata(offsets, sizes))
            whole.storage_data[metadata.MetadataIndex(key, offsets)] = info
    if kind == 0:
        chunk = draw.choice([scarred(draw, chunk), torch_file(evil), pickle.dumps(evil).ljust(len(chunk), b"x")])
        info.length = len(chunk)
    elif kind == 1:
        setattr(whole, draw.choice(list(vars(whole))), draw.choice([evil, nasty(draw)]))
    elif kind == 2:
        part = draw.choice([info, described, described.chunks[0]])
        setattr(part, draw.choice(list(vars(part))), draw.choice([evil, nasty(draw), torch.Size((2**40, 6))]))
    data = pickle.dumps(whole, draw.choice((2, 4)))
    data = scarred(draw, data) if kind == 3 else pickle.dumps(evil) if kind == 4 else data
    (place / ".metadata").write_bytes(data)
    (place / "__0_0.distcp").write_bytes(chunk)
    return place


def _gguf(draw: random.Random, place: Path) -> Path:
    """Scarred, or with a number of the header changed: a length, a count, a type, a dimension or an offset."""
    data = bytearray(gguf_bytes())
    if draw.random() < 0.5:
        return _put(place, model__gguf=scarred(draw, bytes(data)))
    at = draw.randrange(4, 2000)
    data[at : at + 8] = draw.choice((0, 1, 2**16, 2**31, 2**40, 2**63, 2**64 - 1)).to_bytes(8, "little")
    return _put(place, model__gguf=bytes(data))


def _copied(draw: random.Random, place: Path) -> Path:
    _put(place, model__safetensors=weights())
    name = place / draw.choice(
        ("config.json", "tokenizer.json", "vocab.txt", "adapter_config.json", "merges.txt", "modules.json", "code.py")
    )
    if draw.random() < 0.3:
        modules = [disturbed(draw, {"idx": 0, "name": "0", "path": "1_Pooling", "type": "x.Y"}), nasty(draw)]
        _put(place, modules__json=to_json(draw, draw.choice([modules, modules[:1]])))
        name.unlink(missing_ok=True)
    kind = draw.randrange(5)
    if kind == 0:
        name.mkdir()
    elif kind == 1:
        name.symlink_to(draw.choice((place.parent / "canary", Path("/etc/hostname"), Path("/dev/zero"), name)))
    elif kind == 2:
        os.mkfifo(name)
    elif kind == 3:
        name.write_bytes(draw.randbytes(50))
    else:
        (place / os.fsdecode(b"\xff\xfe.safetensors")).write_bytes(weights())
        (place / "model.safetensors").unlink()
    return place


KINDS: dict[str, Callable[[random.Random, Path], Path]] = {
    "safetensors": _header,
    "index": _index,
    "config": _config,
    "adapter": _adapter,
    "pickle": _pickle,
    "distributed": _distributed,
    "gguf": _gguf,
    "copied": _copied,
}


def case(seed: int, kind: str | None = None) -> Case:
    """The same for the same seed, of one kind or of any."""
    kind = kind or list(KINDS)[seed % len(KINDS)]
    return Case(f"{kind} {seed}", lambda place: KINDS[kind](random.Random(seed), place))


# --- what once did harm -----------------------------------------------------------------------------------


def known() -> Iterator[Case]:
    def of(label: str, write: Callable[[Path], Path]) -> Case:
        return Case(label, write)

    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    many = ",".join(f'"t{n}":{json.dumps(entry)}' for n in (*range(60_000), 59_999))
    yield of("60,000 names, the last twice", lambda place: _put(place, model__safetensors=safetensors(f"{{{many}}}")))
    index = {"weight_map": {f"t{n}": f"{n}.safetensors" for n in range(10**5)}}
    yield of("an index of many", lambda place: _put(place, model__safetensors__index__json=json.dumps(index)))
    cyclic: dict[str, Any] = {}
    cyclic["state_dict"] = cyclic
    yield of("a cyclic state dict", lambda place: _put(place, pytorch_model__bin=torch_file(cyclic)))
    doubled = b"\x80\x02})q\x00" + b"h\x00\x86q\x00" * 60 + b"K\x01s."
    yield of("tuples that double", lambda place: _put(place, pytorch_model__bin=with_pickle(doubled)))
    expanded = {"norm.weight": torch.ones(1).expand(2**45)}
    yield of("an expanded tensor", lambda place: _put(place, pytorch_model__bin=torch_file(expanded)))
    for name, value in {
        "num_hidden_layers": 10**6,
        "hidden_size": 10**12,
        "vocab_size": 10**18,
        "num_labels": 10**9,
        "rope_theta": 10**400,
    }.items():
        config = json.dumps({**LLAMA, name: value})
        yield of(f"{name}: {value:.0e}" if value < 1e300 else name, partial(_put, config__json=config))
    yield of("a configuration 3,000 levels deep", lambda place: _put(place, config__json=f'{{"a":{deep(3000)}}}'))
    for field in (
        {"lora_alpha": 10**400},
        {"lora_alpha": 1e308},
        {"rank_pattern": {"a{99999999999}": 2}},
        {"rank_pattern": {"(?i)a": 2}},
        {"rank_pattern": {"(a+)+$": 2, "((.*)*)*x": 2}},
    ):
        text = json.dumps({**ADAPTER, **field})
        yield of(f"an adapter with {str(field)[:40]}", partial(_put_adapter, config=text))
