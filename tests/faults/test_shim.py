"""The attack itself: a harness that misses what it is to find would call everything clean."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.conftest import files
from tests.faults import children
from tests.faults.power import after_cut, saved
from tests.faults.shim import Call, Fault, Shim


def session(place: Path) -> None:
    """Changes of every kind."""
    (place / "steps").mkdir()
    with (place / "steps" / "a").open("w") as file:
        file.write("first")
        file.flush()
        os.fsync(file.fileno())
    descriptor = os.open(place / "b", os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(descriptor, 0, 8)
    os.pwrite(descriptor, b"bytes", 2)
    os.ftruncate(descriptor, 7)
    os.close(descriptor)
    os.link(place / "b", place / "c")
    (place / "b").replace(place / "d")
    shutil.copyfile(place / "d", place / "e")
    (place / "e").unlink()
    shutil.rmtree(place / "steps")


KINDS = ["mkdir", "open", "write", "fsync", "open", "allocate", "write", "truncate", "link", "rename", "open", "write"]
KINDS += ["unlink", "unlink", "unlink"]


def shimmed(place: Path, fault: Fault | None = None) -> children.Outcome:
    def act() -> list[str]:
        shim = Shim(place, fault=fault)
        shim.install()
        session(place)
        return shim.kinds

    return children.run(act, place)


def test_every_change_is_seen(tmp_path: Path) -> None:
    outcome = shimmed(tmp_path)
    assert outcome.result == KINDS, outcome.err
    assert files(tmp_path) == {"c": b"\0\0bytes", "d": b"\0\0bytes"}


@pytest.mark.parametrize("number", range(1, len(KINDS) + 1))
def test_the_nth_change_fails_or_is_the_last(number: int, tmp_path: Path) -> None:
    failed = shimmed(tmp_path, Fault(number, "EIO"))
    assert "Input/output error" in failed.err
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    assert shimmed(tmp_path, Fault(number, "kill")).code == -signal.SIGKILL


def test_a_change_behind_its_back_is_refused(tmp_path: Path) -> None:
    def act() -> None:
        from io import FileIO

        Shim(tmp_path).install()
        FileIO(tmp_path / "file", "w")

    assert "the shim was bypassed" in children.run(act).err


def test_a_write_is_torn_or_short(tmp_path: Path) -> None:
    assert shimmed(tmp_path, Fault(3, "torn")).was_killed
    assert (tmp_path / "steps" / "a").read_bytes() == b"fi"
    shutil.rmtree(tmp_path / "steps")
    assert shimmed(tmp_path, Fault(3, "short")).code == 0


def test_a_full_disk_takes_a_part(tmp_path: Path) -> None:
    def act() -> None:
        Shim(tmp_path, room=10).install()
        (tmp_path / "a").write_bytes(bytes(6))
        (tmp_path / "b").write_bytes(bytes(6))

    assert "No space left" in children.run(act).err
    assert {name: len(data) for name, data in files(tmp_path).items()} == {"a": 6, "b": 4}


def cut(place: Path, variant: str, changes: int | None = None) -> dict[str, bytes]:
    """What a power cut leaves of a file that is written beside, and replaced without a flush of the directory."""
    place.mkdir()
    start, work = place / "start", place / "work"
    start.mkdir()
    (start / "file").write_text("old")
    shutil.copytree(start, work)

    def act() -> list[Call]:
        shim = Shim(work)
        shim.install()
        with (work / "new").open("w") as file:
            file.write("new")
            file.flush()
            os.fsync(file.fileno())
        (work / "new").replace(work / "file")
        (work / "other").write_text("never flushed")
        return shim.calls

    calls = children.run(act).result
    saved(after_cut(start, work, calls[:changes], variant, seed=0), place / "left")
    return files(place / "left")


def test_what_was_not_flushed_is_lost(tmp_path: Path) -> None:
    assert cut(tmp_path / "1", "flushed") == {"file": b"old"}
    assert cut(tmp_path / "2", "names") == {"file": b"new", "other": b""}
    assert cut(tmp_path / "3", "bytes") == {"file": b"old"}
    assert cut(tmp_path / "4", "names", changes=2) == {"file": b"old", "new": b""}
