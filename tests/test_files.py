import errno
import os
import sys
from pathlib import Path

import pytest

import mergestream.files
from mergestream import Store
from mergestream.checkpoints.layout import module_folders
from mergestream.checkpoints.tokenizer import read_tokenizer
from mergestream.errors import MergestreamError, StoreBusyError
from mergestream.files import exchange, new_directories, read_json, remove, write_json, write_text
from mergestream.storage import open_storage


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


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "free some disk space"),
        (errno.EDQUOT, "free some disk space"),
        (errno.EFBIG, "ulimit -f"),
        (errno.EIO, ""),
    ],
)
def test_only_a_full_disk_wants_room(number: int, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(MergestreamError, match=rf"cannot be written: {os.strerror(number)}") as caught:
        write_text(tmp_path / "file", "text")
    assert remedy in str(caught.value) and ("free some disk space" in str(caught.value)) == (
        remedy == "free some disk space"
    )


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    for link in ("file", "file.new"):
        (tmp_path / link).symlink_to(tmp_path / "victim")
    write_text(tmp_path / "file", "text")
    assert (tmp_path / "victim").read_text() == "mine"
    assert (tmp_path / "file").read_text() == "text" and not (tmp_path / "file").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "victim"]


def test_a_file_is_put_only_if_it_is_still_the_expected_one(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    first = storage.put_if("file", b"first", None)
    second = storage.put_if("file", b"second!", first)
    for expected in (None, first):
        with pytest.raises(StoreBusyError, match="file was changed by another process in the meantime"):
            storage.put_if("file", b"third", expected)
    assert storage.fetch("file") == (b"second!", second) and [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_is_left_of_a_removal_is_removed_with_the_next(tmp_path: Path) -> None:
    (tmp_path / "0001" / "inner").mkdir(parents=True)
    (tmp_path / ".0001.removed" / "inner").mkdir(parents=True)
    remove(tmp_path / "0001")
    remove(tmp_path / "0001")
    assert list(tmp_path.iterdir()) == []


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


def two_directories(place: Path) -> tuple[Path, Path, Path]:
    for name in ("new", "old"):
        (place / name).mkdir()
        (place / name / name).touch()
    return place / "new", place / "old", place / "aside"


def listing(place: Path) -> list[str]:
    return sorted(str(path.relative_to(place)) for path in place.rglob("*"))


@pytest.mark.parametrize("atomic", [True, False])
def test_two_directories_change_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, atomic: bool) -> None:
    if not atomic:
        monkeypatch.setattr(mergestream.files, "_exchange_at_once", lambda one, other: False)
    replaced = exchange(*two_directories(tmp_path)).name
    assert replaced == ("new" if atomic else "aside")
    assert listing(tmp_path) == [replaced, f"{replaced}/old", "old", "old/new"]


@pytest.mark.skipif(sys.platform != "linux", reason="others need two renames")
def test_linux_exchanges_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "rename", full)
    exchange(*two_directories(tmp_path))
    assert listing(tmp_path) == ["new", "new/old", "old", "old/new"]


@pytest.mark.parametrize("failing", [1, 2])
def test_an_exchange_that_fails_leaves_both_where_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    original, calls = Path.rename, []

    def rename(*paths: Path) -> None:
        calls.append(paths)
        if len(calls) == failing:
            full()
        original(*paths)

    new, old, aside = two_directories(tmp_path)
    monkeypatch.setattr(mergestream.files, "_exchange_at_once", lambda one, other: False)
    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OSError, match="No space left"):
        exchange(new, old, aside)
    assert listing(tmp_path) == ["new", "new/new", "old", "old/old"]


def test_directories_that_were_made_for_nothing_are_removed(tmp_path: Path) -> None:
    with new_directories(tmp_path / "a" / "b"):
        assert listing(tmp_path) == ["a", "a/b"]
    with pytest.raises(KeyboardInterrupt), new_directories(tmp_path / "a" / "c" / "d"):
        assert listing(tmp_path) == ["a", "a/b", "a/c", "a/c/d"]
        raise KeyboardInterrupt
    assert listing(tmp_path) == ["a", "a/b"]


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
    with pytest.raises(MergestreamError, match=r"file\.json is not valid JSON with finite numbers"):
        read_json(path, finite=True)


def test_a_pipe_keeps_nobody_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "file.json")
    with pytest.raises(MergestreamError, match=r"file\.json is not a regular file"):
        read_json(tmp_path / "file.json")


def test_an_endless_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    for name in ("file.json", "modules.json", "vocab.txt", "manifest.json"):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, 1 << 40)
    with pytest.raises(MergestreamError, match=r"file\.json is too large"):
        read_json(tmp_path / "file.json")
    with pytest.raises(MergestreamError, match=r"modules\.json is too large"):
        module_folders(tmp_path)
    assert read_tokenizer(tmp_path) is None
    with pytest.raises(MergestreamError, match=r"manifest\.json is too large"):
        Store(tmp_path)
