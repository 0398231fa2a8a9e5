"""Read a few unlabelled inputs: text, conversations, images, or arrays that the model takes.

Of a file the first samples are taken, of a directory of images evenly spaced ones in the order of their names.
Labels are never read. No more of a file or pipe is read than these samples need.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergestream.checkpoints import open_checkpoint
from mergestream.checkpoints.location import system_errors_explained
from mergestream.errors import MergestreamError, UsageError, first_line
from mergestream.escaping import one_line
from mergestream.progress import Progress
from mergestream.sizes import counted, format_size, shorten_list

if TYPE_CHECKING:
    from torch import nn

NEW_TOKENS = 32
COUNT, FEW, FEWEST = 64, 16, 2
"""How many samples are taken by default, below how many the user is warned, and how many are needed"""
TEXTS = (
    ("text", "text_pair"),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "context"),
    *(("text",), ("sentence",), ("prompt",), ("question",)),
)
"""The fields of one text or of a pair; the first of these that a record has"""
PICTURES = ("image", "img")
FIELDS = {"messages", "completion", *PICTURES, *chain(*TEXTS)}
"""The fields of a record that are read"""
_USABLE = "messages, prompt and completion, text, a pair such as sentence1 and sentence2, or image"
LABELS = ("label", "labels", "target", "targets", "y")
"""Arrays that are ignored"""
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")
MAX_LINE_BYTES, MAX_LINES, MAX_ARRAY_BYTES, MAX_PIXELS = 1 << 24, 1_000_000, 1 << 32, 1 << 26
"""Larger files are refused before they fill the memory"""

Source = str | Path | Iterable[Any]
Call = Callable[["nn.Module", Any], Any]
"""A user's way to run a model on one input; a tensor that it returns holds the features, one row per input"""


@dataclass(frozen=True)
class Inputs:
    """A few unlabelled inputs of an expert, and how models are run on them; by default transformers does it."""

    source: Source
    """A file, a directory of images, or an iterable of what the processor or the model takes"""
    count: int = COUNT
    """How many are taken at most"""
    tokens: int = NEW_TOKENS
    """How many tokens of an answer a generative model writes where none is given"""
    model: nn.Module | None = None
    """The class of model, with any weights: they are replaced in a copy"""
    call: Call | None = None

    @staticmethod
    def of(given: Source | Inputs) -> Inputs:
        return given if isinstance(given, Inputs) else Inputs(given)


@dataclass(frozen=True)
class Sample:
    """One input, and the file and line that it came from."""

    value: Any
    """A record of text or an image, tensors by the name of the model's argument, or any object that a model takes"""
    where: str


def read_inputs(inputs: Source, count: int = COUNT, progress: Progress | None = None) -> list[Sample]:
    """At most ``count`` samples of a file, a directory of images, or any Python iterable."""
    if count < FEWEST:
        raise UsageError(f"{count} inputs are too few: take at least {FEWEST}")
    if isinstance(inputs, str | Path):
        source = str(inputs)
        with system_errors_explained(source):
            samples = list(islice(_open(Path(inputs).expanduser(), count), count))
    else:
        source = "the inputs"
        samples = [_of_object(item, f"input {number}") for number, item in enumerate(islice(inputs, count), 1)]
    if len(samples) < FEWEST:
        raise MergestreamError(f"{source}: {counted(len(samples), 'input')}; at least {FEWEST} are needed")
    if len(samples) < FEW and progress:
        progress.note(f"{source}: {len(samples)} inputs are few; {FEW} or more give a better merge")
    return samples


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Raise any error of another library as one sentence that begins with ``what``."""
    try:
        yield
    except MergestreamError:
        raise
    except Exception as error:  # these libraries raise anything for what they do not like
        hint = f"; pip install {error.name}" if isinstance(error, ImportError) else ""
        raise MergestreamError(f"{what}: {one_line(first_line(error)).rstrip('.')}{hint}") from error


def open_image(picture: Any) -> Any:
    """Decode an image: a path, the bytes of a file, or an image already, as RGB."""
    from PIL import Image

    if isinstance(picture, Mapping):
        picture = picture.get("bytes")
    if isinstance(picture, bytes):
        picture = io.BytesIO(picture)
    with Image.open(picture) if isinstance(picture, Path | io.BytesIO) else picture as image:
        if image.width * image.height > MAX_PIXELS:
            raise ValueError(f"it has {image.width} × {image.height} pixels, more than {MAX_PIXELS}")
        return image.convert("RGB")


def _open(path: Path, count: int) -> Iterator[Sample]:
    if path.is_dir():
        return _images(path, count)
    suffix, kinds = path.suffix.lower(), {".parquet": _parquet, ".npz": _npz, ".safetensors": _safetensors}
    if suffix in kinds:
        return kinds[suffix](path, count)
    return _lines(path, is_json=suffix in (".jsonl", ".json", ".ndjson"))


# --- text ---------------------------------------------------------------------------------------------------


def _lines(path: Path, *, is_json: bool) -> Iterator[Sample]:
    """The lines that are not blank: text, or a JSON object each."""
    with path.open("rb") as file:
        for number in range(1, MAX_LINES):
            where = f"{path}, line {number}"
            line = file.readline(MAX_LINE_BYTES + 1)
            if not line:
                return
            if len(line) > MAX_LINE_BYTES:
                raise MergestreamError(f"{where} is longer than {format_size(MAX_LINE_BYTES)}; give one input per line")
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            except UnicodeDecodeError as error:
                raise MergestreamError(f"{where} is not UTF-8 text; convert the file") from error
            try:
                record = json.loads(text) if is_json and text else {"text": text}
            except (ValueError, RecursionError) as error:
                raise MergestreamError(f"{where} is not a JSON object; write one object per line") from error
            if text:
                yield _of_record(record, where)


def _parquet(path: Path, count: int) -> Iterator[Sample]:
    with explained(f"{path} cannot be read"):
        from pyarrow import parquet

        file = parquet.ParquetFile(path, memory_map=True)
        columns = [name for name in file.schema_arrow.names if name in FIELDS]
        if not columns:
            raise MergestreamError(f"{path} has only {_listed(file.schema_arrow.names)}; a column must be {_USABLE}")
        rows = (row for batch in file.iter_batches(min(count, 256), columns=columns) for row in batch.to_pylist())
        for number, row in enumerate(rows, 1):
            yield _of_record({name: value for name, value in row.items() if value is not None}, f"{path}, row {number}")


def _of_record(record: Any, where: str) -> Sample:
    """Keep the fields that are input; a prompt may be text or messages."""
    if not isinstance(record, Mapping):
        raise MergestreamError(f"{where} is not a JSON object; write one object per line")
    prompt, completion = record.get("prompt"), record.get("completion")
    if isinstance(prompt, list):
        found: dict[str, Any] = {"messages": prompt + (completion if isinstance(completion, list) else [])}
    elif "messages" in record:
        found = {"messages": record["messages"]}
    elif picture := next((field for field in PICTURES if field in record), None):
        return Sample({"image": record[picture]}, where)
    elif prompt is not None and completion is not None:
        found = {"prompt": prompt, "completion": completion}
    elif fields := next((fields for fields in TEXTS if record.keys() >= set(fields)), None):
        found = dict(zip(("text", "text_pair"), map(record.get, fields), strict=False))
    else:
        raise MergestreamError(f"{where} has no field to read ({_listed(record)}); it needs {_USABLE}")
    for field, value in found.items():
        if field == "messages":
            if not value or not isinstance(value, list) or not all(_is_message(message) for message in value):
                raise MergestreamError(f"{where}: messages must be a list of objects with role and content")
        elif not isinstance(value, str) or not value.strip():
            raise MergestreamError(f"{where}: {field} must be text, and not empty")
    return Sample(found, where)


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("role"), str) and "content" in message


def _of_object(item: Any, where: str) -> Sample:
    """Turn a Python object into a sample: text, a pair, a record, an image, or what the model takes."""
    if isinstance(item, str):
        return _of_record({"text": item}, where)
    if isinstance(item, tuple) and len(item) == 2 and all(isinstance(part, str) for part in item):
        return _of_record({"text": item[0], "text_pair": item[1]}, where)
    if isinstance(item, Mapping) and any(field in item for field in FIELDS):
        return _of_record(item, where)
    if hasattr(item, "convert") and hasattr(item, "width"):
        return Sample({"image": item}, where)
    return Sample(item, where)


# --- images and arrays --------------------------------------------------------------------------------------


def _images(directory: Path, count: int) -> Iterator[Sample]:
    paths = sorted(path for path in directory.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file())
    if not paths:
        raise MergestreamError(f"{directory} holds no images ({', '.join(IMAGE_SUFFIXES)})")
    for number in range(min(count, len(paths))):
        path = paths[number * len(paths) // min(count, len(paths))]
        if not path.resolve().is_relative_to(directory.resolve()):
            raise MergestreamError(f"{path} is a link that leads out of the directory; copy the file there")
        with explained(f"{path} cannot be read"):
            open_image(path)
        yield Sample({"image": path}, str(path))


def _npz(path: Path, count: int) -> Iterator[Sample]:
    import numpy
    import torch

    with (
        explained(f"{path} cannot be read"),
        zipfile.ZipFile(path) as archive,
        numpy.load(path, allow_pickle=False) as arrays,
    ):
        size = sum(entry.file_size for entry in archive.infolist())
        if size > MAX_ARRAY_BYTES:
            raise MergestreamError(f"{path} holds {format_size(size)} of arrays; keep the first {count} samples")
        found = {name: torch.from_numpy(arrays[name]) for name in arrays.files if name not in LABELS}
    return _rows(path, found, count)


def _safetensors(path: Path, count: int) -> Iterator[Sample]:
    with open_checkpoint(path) as file:
        return _rows(path, {name: file.read(name) for name in file.tensors if name not in LABELS}, count)


def _rows(path: Path, arrays: Mapping[str, Any], count: int) -> Iterator[Sample]:
    """One sample per index of the first dimension, which all arrays share; each keeps that dimension."""
    lengths = {name: min(array.shape[0], count) if array.ndim else 0 for name, array in arrays.items()}
    if not arrays:
        raise MergestreamError(f"{path} holds no inputs, only labels or nothing; name arrays as the model's arguments")
    if len(set(lengths.values())) > 1 or not all(array.ndim for array in arrays.values()):
        shapes = ", ".join(f"{one_line(name)} {list(array.shape)}" for name, array in arrays.items())
        raise MergestreamError(f"{path}: the first dimension of all arrays must be the sample ({shapes})")
    for row in range(min(lengths.values())):
        yield Sample({name: array[row : row + 1] for name, array in arrays.items()}, f"{path}, row {row}")


def _listed(names: Iterable[str]) -> str:
    return one_line(shorten_list(list(names), 5)) or "nothing"
