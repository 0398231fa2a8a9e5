"""What counts of a store: one manifest, read as of one commit, replaced by one, and tidied up after."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from mergestream.base.model import BaseModel
from mergestream.errors import MergestreamError, UsageError
from mergestream.files import DRAFT_SUFFIX, remove, remove_other_directories, sync_directory
from mergestream.interrupts import uninterrupted
from mergestream.progress import Progress, default_progress
from mergestream.sizes import counted
from mergestream.store.lock import writing_to
from mergestream.store.manifest import Expert, Manifest, folder_name
from mergestream.store.mirror import Mirror, has_folder, new_mark, place_of
from mergestream.store.parts import CANDIDATE, check_parts
from mergestream.store.snapshot import Snapshot
from mergestream.store.steps import is_begun, tidy
from mergestream.store.tidying import tidy_bucket

Result = TypeVar("Result")


class Commits:
    """A place, and the manifest that counts there."""

    def __init__(
        self,
        path: str | Path | Mirror,
        progress: Progress | None = None,
        manifest: Manifest | None = None,
    ) -> None:
        """``manifest`` is for who is about to write it: once it is written, nothing may fail."""
        self.place = place_of(path)
        check_parts(self.place)
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
        kept = self._kept
        return all(
            entry.state and entry.folder in kept and has_folder(self.place, f"steps/{entry.folder}")
            for entry in manifest.readable
        )

    @property
    def _kept(self) -> set[str]:
        """The folders in ``steps`` that stay."""
        history, keep = self.manifest.history, self.manifest.keep
        return {entry.folder for entry in (*history[-keep - 1 :], *self.manifest.readable) if entry.state}

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the store for writing, with the manifest as others have left it, and nothing in the way but a step that
        may be resumed."""
        with writing_to(self.place):
            check_parts(self.place)
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
            manifest = dataclasses.replace(manifest, commit=new_mark(self.place))
            manifest.save(self.place)
            self.manifest, self._replaced = manifest, self.manifest.commit

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
        """Bring the manifest's name to the disk, then remove what it does not refer to; what is ``resumable`` may stay,
        a step that was cut short."""
        kept, experts = self._kept, {entry.folder for entry in self.history}
        if isinstance(self.place, Mirror):
            return tidy_bucket(self.place, self.manifest, kept, experts, None if resumable else self._replaced)
        following = folder_name(self.manifest.next_number, "")
        spared = {following} if resumable and is_begun(self.place, following) else set()
        sync_directory(self.place)  # first: after a power cut the manifest before it may be back, and needs its steps
        remove_other_directories(self.place / "steps", kept | spared)
        for folder in kept:
            tidy(self.place, folder)
        remove_other_directories(self.place / "experts", experts | spared)
        remove(self.place / CANDIDATE)
        for unfinished in self.place.glob(f"*.json{DRAFT_SUFFIX}"):
            unfinished.unlink(missing_ok=True)
