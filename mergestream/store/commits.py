"""What counts of a store: one manifest, read as of one commit, replaced by one, and tidied up after."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from mergestream.base.model import BaseModel
from mergestream.errors import MergestreamError, UsageError
from mergestream.interrupts import uninterrupted
from mergestream.progress import Progress, default_progress
from mergestream.sizes import counted
from mergestream.storage import Storage, open_storage
from mergestream.store.manifest import MANIFEST, Expert, Manifest
from mergestream.store.snapshot import Snapshot
from mergestream.store.step_storage import clean_up

Result = TypeVar("Result")


class Commits:
    """A place, and the manifest that counts there."""

    def __init__(
        self,
        path: str | Path | Storage,
        progress: Progress | None = None,
        manifest: Manifest | None = None,
    ) -> None:
        """``manifest`` is for who is about to write it: once it is written, nothing may fail."""
        self.place = open_storage(path)
        self.place.check()
        self._moved: BaseModel | None = None
        self._replaced = ""
        """The commit that our last one has replaced, as others may have wanted to"""
        self.manifest = manifest or self._load()
        self.progress = progress or default_progress()

    @property
    def history(self) -> tuple[Expert, ...]:
        """The absorbed models, in order."""
        return self.manifest.history

    def refresh(self) -> None:
        """See what other processes have made of it."""
        self.manifest = self._load()

    def _load(self) -> Manifest:
        """The manifest as it is on disk, with the base where it was found."""
        manifest = Manifest.load(self.place)
        return dataclasses.replace(manifest, base=self._moved) if self._moved else manifest

    def retried(self, read: Callable[[], Result]) -> Result:
        """What is read of the store by one manifest: once more where a writer has committed another meanwhile, and has
        perhaps removed what was being read."""
        self.manifest = self._load()
        while True:
            manifest = self.manifest
            try:
                found = read()
            except (MergestreamError, OSError):
                met, self.manifest = self.manifest, self._load()
                if met == manifest == self.manifest:  # one that `snapshot` has met may have been taken back since
                    raise
            else:
                if self.manifest == manifest:  # else `snapshot` has met a newer one on the way
                    return found

    def snapshot(self, step: int | None = None) -> Snapshot:
        """The state after a step (the last one by default) and the manifest that belongs to it.

        A writer may commit meanwhile, take steps back and write others in their place: what was opened
        counts only if the manifest is the same before and after.
        """
        self.manifest = self._load()
        while True:
            manifest = self.manifest
            number = manifest.step if step is None else step
            self._check_kept(number)
            try:
                snapshot = Snapshot.open(self.place, manifest.at(number))
            except UsageError:  # a method that is not known
                raise
            except (MergestreamError, OSError) as error:
                self.manifest = self._load()
                if self.manifest == manifest:
                    raise MergestreamError(f"the state of step {number} cannot be read: {error}") from error
                continue
            self.manifest = self._load()
            if self.manifest == manifest:
                return snapshot
            snapshot.close()

    def _check_kept(self, number: int) -> None:
        """Refuse a step that the store has not taken, or no longer keeps."""
        if not self.history:
            raise MergestreamError(f"{self.place} has absorbed nothing yet; add an expert first")
        if number > self.manifest.step:
            taken = counted(self.manifest.step, "step")
            raise MergestreamError(f"{self.place} has taken {taken}, there is no step {number}")
        if number < self.manifest.step and not self._keeps(self.manifest.at(number)):
            raise MergestreamError(f"{self.place} no longer keeps step {number}; {self._keep_more()}")

    def _keep_more(self) -> str:
        return f"to go back further in future: mergestream keep {self.place} {self.manifest.keep + 1}"

    def _keeps(self, manifest: Manifest) -> bool:
        """Whether all that is remembered by such a manifest is there, and is not about to be removed."""
        there = self._kept & set(self.place.folders("steps"))
        return all(entry.state and entry.folder in there for entry in manifest.readable)

    @property
    def _kept(self) -> set[str]:
        """The folders in ``steps`` that stay."""
        history, keep = self.manifest.history, self.manifest.keep
        return {entry.folder for entry in (*history[-keep - 1 :], *self.manifest.readable) if entry.state}

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the store for writing, with the manifest as others have left it, and nothing in the way but a step that
        may be resumed."""
        with self.place.writing(MANIFEST):
            self.place.check()
            self.manifest = found = self._load()
            with suppress(OSError, MergestreamError):
                self._tidy(resumable=True)
            try:
                yield
            except KeyboardInterrupt as interrupt:
                if self.manifest == found:
                    raise
                done = f"it is done all the same, {self.place} is at step {self.manifest.step}"
                raise type(interrupt)(done) from None

    def _commit(self, manifest: Manifest) -> None:
        """Make a manifest real: where this fails nothing has changed, and where it returns, or is interrupted
        afterwards, it counts. `_settle` is what remains to be done then."""
        with uninterrupted():
            manifest = dataclasses.replace(manifest, commit=self.place.new_mark(), version=self.manifest.version)
            self.manifest, self._replaced = manifest.save(self.place), self.manifest.commit

    def _settle(self, resumable: bool = False) -> None:
        """Tidy up after a commit. Nothing that counts depends on it: what goes wrong is only told."""
        try:
            self._tidy(resumable)
        except (OSError, MergestreamError) as error:
            where, why = "what is left over", str(error)
            if isinstance(error, OSError):
                where, why = error.filename or where, error.strerror or why
            self.progress.note(
                f"{self.place} is at step {self.manifest.step}, but {where} could not be tidied up: {why}; "
                "the next command that writes does it"
            )

    def _tidy(self, resumable: bool = False) -> None:
        """Make the manifest durable, then remove what it does not need; if ``resumable``, an interrupted step stays."""
        clean_up(self.place, self.manifest, self._kept, None if resumable else self._replaced)
