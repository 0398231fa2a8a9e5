"""Reading unlabelled inputs: what is taken of each kind of file, and a sentence for what cannot be used."""

from __future__ import annotations

import json
import os
import threading
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from safetensors.torch import save_file

from mergestream.errors import MergestreamError, MergestreamWarning, UsageError
from mergestream.inputs import reading
from mergestream.inputs.reading import Source, open_image, read_inputs
from mergestream.progress import NoProgress, Progress


def values(inputs: Source, count: int = 64) -> list[Any]:
    return [sample.value for sample in read_inputs(inputs, count, NoProgress())]


def json_lines(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"text": "a", "label": 1}, {"text": "a"}),
        ({"messages": CHAT, "id": 3}, {"messages": CHAT}),
        ({"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "b"}),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, {"messages": CHAT}),
        ({"prompt": "a"}, {"text": "a"}),
        ({"text": "a", "text_pair": "b"}, {"text": "a", "text_pair": "b"}),
        ({"sentence1": "a", "sentence2": "b", "label": 0}, {"text": "a", "text_pair": "b"}),
        ({"premise": "a", "hypothesis": "b"}, {"text": "a", "text_pair": "b"}),
    ],
)
def test_records(tmp_path: Path, record: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert values(json_lines(tmp_path / "inputs.jsonl", record, record)) == [expected, expected]
    assert values([record, record]) == [expected, expected]
    if "messages" not in expected or "messages" in record:
        parquet.write_table(pyarrow.Table.from_pylist([record, record]), tmp_path / "inputs.parquet")
        assert values(tmp_path / "inputs.parquet") == [expected, expected]


def test_the_first_lines_are_taken_and_blank_ones_skipped(tmp_path: Path) -> None:
    path = tmp_path / "inputs.txt"
    path.write_text("\ufeffone\n\n  two  \nthree\n")
    assert values(path, 2) == [{"text": "one"}, {"text": "two"}]
    assert [sample.where for sample in read_inputs(path, progress=NoProgress())][1] == f"{path}, line 3"
    assert values(iter(["a", ("b", "c"), 5]), 3) == [{"text": "a"}, {"text": "b", "text_pair": "c"}, 5]


def test_an_endless_pipe_is_read_no_further_than_needed(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def write() -> None:
        try:
            with pipe.open("w") as file:
                while True:
                    file.write("again\n" * 1000)
        except BrokenPipeError:
            pass

    writer = threading.Thread(target=write)
    writer.start()
    assert len(values(pipe, 5)) == 5
    writer.join(10)
    assert not writer.is_alive()


def test_images_are_spread_over_the_directory(tmp_path: Path) -> None:
    for number in range(6):
        (tmp_path / f"class-{number // 3}").mkdir(exist_ok=True)
        Image.new("L", (4, 5), number).save(tmp_path / f"class-{number // 3}" / f"{number}.png")
    taken = values(tmp_path, 3)
    assert [value["image"].stem for value in taken] == ["0", "2", "4"]
    image = open_image(taken[1]["image"])
    assert (image.mode, image.size, image.getpixel((0, 0))) == ("RGB", (4, 5), (2, 2, 2))
    data = (tmp_path / "class-0" / "1.png").read_bytes()
    table = pyarrow.Table.from_pylist([{"image": {"bytes": data, "path": "/etc/passwd"}, "label": 1}] * 2)
    parquet.write_table(table, tmp_path / "images.parquet")
    assert open_image(values(tmp_path / "images.parquet")[0]["image"]).getpixel((0, 0)) == (1, 1, 1)
    assert open_image(values([Image.new("L", (2, 2)), {"image": image, "label": 3}])[0]["image"]).mode == "RGB"


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_arrays(tmp_path: Path, kind: str) -> None:
    arrays = {"input_ids": torch.arange(12).reshape(4, 3), "labels": torch.zeros(7)}
    path = tmp_path / f"inputs.{kind}"
    if kind == "npz":
        numpy.savez(path, **{name: array.numpy() for name, array in arrays.items()})  # type: ignore[arg-type]
    else:
        save_file(arrays, path)
    first, second = values(path, 2)
    assert first.keys() == {"input_ids"}
    assert first["input_ids"].tolist() == [[0, 1, 2]]
    assert second["input_ids"].tolist() == [[3, 4, 5]]
    assert len(values(path)) == 4


def write_arrays(path: Path, **arrays: Any) -> None:
    numpy.savez(path, **arrays)


def write_parquet(path: Path, **columns: Sequence[Any]) -> None:
    parquet.write_table(pyarrow.table(columns), path)


BAD: list[tuple[str, Any, str]] = [
    ("one.jsonl", '{"text": "a"}\n{"text": \n', r"one.jsonl, line 2 is not a JSON object"),
    ("two.jsonl", '{"text": "a"}\n["a"]\n', r"two.jsonl, line 2 is not a JSON object"),
    ("deep.jsonl", "[" * 100_000, r"deep.jsonl, line 1 is not a JSON object"),
    ("labels.jsonl", '{"label": 1}\n', r"labels.jsonl, line 1 has no field to read \(label\); it needs messages"),
    ("empty.jsonl", '{"text": " "}\n', r"empty.jsonl, line 1: text must be text, and not empty"),
    ("number.jsonl", '{"premise": "a", "hypothesis": 3}\n', r"line 1: text_pair must be text"),
    ("chat.jsonl", '{"messages": [{"content": "a"}]}\n', r"line 1: messages must be a list of objects with role"),
    ("single.txt", "only\n", r"single.txt: 1 input; at least 2 are needed"),
    ("nothing.txt", "", r"nothing.txt: 0 inputs; at least 2 are needed"),
    ("latin.txt", b"one\n\xe4\n", r"latin.txt, line 2 is not UTF-8"),
    ("torn.parquet", b"PAR1 torn", r"torn.parquet cannot be read"),
    ("labels.parquet", lambda path: write_parquet(path, label=[1, 2]), r"labels.parquet has only label; a column must"),
    ("torn.npz", b"PK torn", r"torn.npz cannot be read"),
    ("torn.safetensors", b"\xff" * 20, r"torn.safetensors is no safetensors file"),
    (
        "objects.npz",
        lambda path: write_arrays(path, x=numpy.array([{}, {}])),
        r"objects.npz cannot be read: Object arr",
    ),
    ("labels.npz", lambda path: write_arrays(path, labels=numpy.zeros(3)), r"labels.npz holds no inputs, only labels"),
    ("words.npz", lambda path: write_arrays(path, x=numpy.array(["a", "b"])), r"words.npz cannot be read: can't conv"),
    ("scalar.npz", lambda path: write_arrays(path, x=numpy.array(3)), r"first dimension of all arrays .*\(x \[\]\)"),
    (
        "uneven.npz",
        lambda path: write_arrays(path, x=numpy.zeros((3, 2)), y_=numpy.zeros((2, 2))),
        r"uneven.npz: the first dimension of all arrays must be the sample \(x \[3, 2\], y_ \[2, 2\]\)",
    ),
]


@pytest.mark.parametrize(("name", "content", "sentence"), BAD, ids=[name for name, *_ in BAD])
def test_bad_files(tmp_path: Path, name: str, content: Any, sentence: str) -> None:
    path = tmp_path / name
    if callable(content):
        content(path)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(MergestreamError, match=sentence) as raised:
        values(path)
    assert "\n" not in str(raised.value)


def test_bad_directories(tmp_path: Path) -> None:
    with pytest.raises(MergestreamError, match="holds no images"):
        values(tmp_path)
    inside = tmp_path / "inside"
    inside.mkdir()
    Image.new("L", (2, 2)).save(tmp_path / "secret.png")
    (inside / "a.png").symlink_to(tmp_path / "secret.png")
    with pytest.raises(MergestreamError, match=r"a\.png is a link that leads out of the directory"):
        values(inside)
    (inside / "a.png").unlink()
    (inside / "b.png").write_bytes(b"no image")
    with pytest.raises(MergestreamError, match=r"b\.png cannot be read: cannot identify image"):
        values(inside)
    with pytest.raises(MergestreamError, match=r"missing\.jsonl cannot be opened: No such file"):
        values(tmp_path / "missing.jsonl")


def test_what_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_LINE_BYTES", 10)
    monkeypatch.setattr(reading, "MAX_ARRAY_BYTES", 10)
    monkeypatch.setattr(reading, "MAX_PIXELS", 10)
    with Path("/dev/zero").open("rb"), pytest.raises(MergestreamError, match="/dev/zero, line 1 is longer than 10 B"):
        values(Path("/dev/zero"))
    numpy.savez(tmp_path / "large.npz", x=numpy.zeros((2, 3)))
    with pytest.raises(MergestreamError, match=r"large\.npz holds .* of arrays; keep the first 64 samples"):
        values(tmp_path / "large.npz")
    with pytest.raises(ValueError, match="it has 4 × 4 pixels"):
        open_image(Image.new("L", (4, 4)))


def test_few_inputs_are_warned_of() -> None:
    with pytest.warns(MergestreamWarning, match="the inputs: 15 inputs are few; 16 or more give a better merge"):
        read_inputs(["a"] * 15, progress=Progress())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_inputs(["a"] * 16, progress=Progress())
    with pytest.raises(UsageError, match="1 inputs are too few"):
        read_inputs(["a"] * 16, 1)
