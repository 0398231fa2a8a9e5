import errno
import os
from pathlib import Path

import pytest

from mergestream.errors import MergestreamError
from mergestream.files import read_json, write_json, write_text


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_file_is_replaced_at_once_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file.json"
    write_json(path, {"λ": 1})
    assert read_json(path) == {"λ": 1}
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MergestreamError, match=r"file\.json cannot be written: No space left on device"):
        write_text(path, "half of ")
    assert read_json(path) == {"λ": 1} and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("content", ["{", "", "\x00", "[" * 100_000])
def test_what_is_no_json_is_one_sentence(tmp_path: Path, content: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(content)
    with pytest.raises(MergestreamError, match=r"file\.json is not valid JSON; restore it, or download it again$"):
        read_json(path)


@pytest.mark.parametrize("content", ["[]", "1", "null", '"text"'])
def test_what_is_no_object_is_one_sentence(tmp_path: Path, content: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(content)
    with pytest.raises(MergestreamError, match=r"file\.json is not a JSON object; restore it, or download it again$"):
        read_json(path)


def test_what_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(MergestreamError, match=r"absent\.json cannot be read: No such file or directory$"):
        read_json(tmp_path / "absent.json")
    (tmp_path / "latin.json").write_bytes(b'{"a": "\xe9"}')
    with pytest.raises(MergestreamError, match=r"latin\.json is not valid JSON"):
        read_json(tmp_path / "latin.json")


@pytest.mark.parametrize("content", ['{"a": "\\ud800"}', '{"\\udfff": 1}'])
def test_half_a_surrogate_pair_is_no_text(tmp_path: Path, content: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(content)
    with pytest.raises(MergestreamError, match=r"file\.json is not valid JSON"):
        read_json(path)


def test_infinity_is_read_as_transformers_writes_it_but_not_where_it_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text('{"limits": [0, Infinity]}')
    assert read_json(path) == {"limits": [0, float("inf")]}
    with pytest.raises(MergestreamError, match=r"file\.json is not valid JSON of finite numbers"):
        read_json(path, finite=True)


def test_a_pipe_keeps_nobody_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "file.json")
    with pytest.raises(MergestreamError, match=r"file\.json is no regular file"):
        read_json(tmp_path / "file.json")
