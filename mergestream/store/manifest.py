"""The manifest: method, base and history of a store. A step counts once the manifest names it."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, TypedDict

from mergestream.base.model import BaseModel, match_names
from mergestream.checkpoints import Checkpoint, open_checkpoint
from mergestream.digest import text_digest
from mergestream.errors import DamagedError, MergestreamError, UsageError, did_you_mean
from mergestream.files import to_json
from mergestream.methods import method_text
from mergestream.schema import BACKUP, Count, Number, Plain, damaged, invalid_file, parse, validate
from mergestream.sizes import counted
from mergestream.storage import Storage, StoredFile
from mergestream.store.expert import Expert, InputsEntry, Removal

if TYPE_CHECKING:
    from mergestream.methods.base import Method

MANIFEST = "manifest.json"
FORMAT = 3
READABLE = (1, 2, FORMAT)
"""Format 1 lacks facts about the base that follow from others, and always has ‖direction‖. Up to format 2 only the last
expert could be removed, so the number of an expert is its position."""
_MARK = re.compile("[0-9a-f]{0,32}")


@dataclass(frozen=True)
class Manifest:
    """The content of ``manifest.json``; ``step`` is the number of experts."""

    method: str
    parameters: Mapping[str, Plain]
    base: BaseModel
    keep: Count
    history: tuple[Expert, ...] = ()
    removed: tuple[Removal, ...] = ()
    """The experts that were removed from a ledger, in the order of their removal"""
    commit: str = ""
    """In object storage: a new random mark for every commit"""
    version: StoredFile | None = field(default=None, compare=False, repr=False)
    """The file that this was loaded from or saved to, for compare-and-swap; None for a new store"""

    def __repr__(self) -> str:
        return f"<Manifest: {self.summary}, base {self.base.source!r}>"

    @property
    def summary(self) -> str:
        """``3 experts merged by opcm(alpha=0.5)``"""
        return f"{counted(self.step, 'expert')} merged by {self.method_text}"

    @property
    def method_text(self) -> str:
        """``opcm(alpha=0.5)``"""
        return method_text(self.method, self.parameters)

    @property
    def step(self) -> int:
        return len(self.history)

    @property
    def is_ledger(self) -> bool:
        """Whether the store keeps one entry per expert; known by the name, because making the method imports torch."""
        return self.method == "ledger"

    def require_ledger(self, ability: str) -> None:
        """Refuse an ``ability`` that only a ledger has: ``can remove any expert``."""
        if not self.is_ledger:
            raise UsageError(
                f"only a ledger {ability}, and this store uses {self.method}; make one with --method ledger"
            )

    @property
    def entries(self) -> tuple[Expert, ...]:
        """The experts that have an entry in a ledger; empty where one state has absorbed all."""
        return tuple(entry for entry in self.history if entry.is_entry)

    @property
    def names(self) -> list[str]:
        """The names of the experts, in their order"""
        return [entry.name for entry in self.history]

    @property
    def adapters(self) -> set[str]:
        """The experts of a ledger that are adapters."""
        return {entry.name for entry in self.history if entry.is_adapter}

    @property
    def sharing(self) -> int:
        """Among how many experts the budget of a ledger is divided when it is read; 0 before the first expert."""
        return max(self.step, *(entry.cut for entry in self.history)) if self.history else 0

    def make_method(self) -> Method:
        from mergestream.methods import make_method

        return make_method(self.method, self.parameters)

    def open_base(self) -> Checkpoint:
        """The base's files, checked by their headers."""
        try:
            checkpoint = open_checkpoint(self.base.source)
        except MergestreamError as error:
            needed = "if it has moved, pass" if self.base.measured else "its weights are needed now: pass"
            raise DamagedError(f"the base cannot be opened: {error}; {needed} --base PATH") from error
        checkpoint = match_names(checkpoint, self.base.tensors)
        self.base.check(checkpoint)
        return checkpoint

    @property
    def next_number(self) -> int:
        """The number for the folders of the next expert."""
        return max((entry.number for entry in self._numbered), default=0) + 1

    @property
    def _numbered(self) -> list[Expert | InputsEntry]:
        """Everything that has a folder of its own."""
        return [*self.recorded, *self.inputs]

    @property
    def recorded(self) -> list[Expert]:
        """The experts whose files stay: those in the history, and the removed ones that `undo` can bring back."""
        return [*self.history, *(removal.expert for removal in self.removed if removal.expert.state)]

    @property
    def inputs(self) -> tuple[InputsEntry, ...]:
        """All statistics of inputs, also those that `undo` may bring back."""
        present = [entry.inputs for entry in self.recorded if entry.inputs]
        return (*present, *(entry.before for entry in present if entry.before))

    @property
    def calibrated(self) -> Expert | None:
        """The expert whose inputs were added last, and after the last expert."""
        last = self.history[-1].name if self.history else ""
        found = [(entry.inputs.number, entry) for entry in self.history if entry.inputs and entry.inputs.after == last]
        return max(found, key=lambda pair: pair[0])[1] if found else None

    @property
    def needed(self) -> tuple[Expert, ...]:
        """The experts whose files the merged model is read from: all of a ledger, else the last one."""
        return self.entries or self.history[-1:]

    @property
    def kept_folders(self) -> set[str]:
        """The folders in ``steps`` that stay: the needed ones, and earlier states for `undo`."""
        recent = self.history[-self.keep - 1 :]
        return {entry.folder for entry in (*recent, *self.needed, *self.recorded[self.step :]) if entry.state}

    def expert(self, name: str) -> Expert:
        """The expert of that name."""
        for entry in self.history:
            if entry.name == name:
                return entry
        raise UsageError(
            f"no expert named {name} has been absorbed{did_you_mean(name, self.names)} "
            f"(there are: {', '.join(self.names) or 'none yet'})"
        )

    def with_expert(self, expert: Expert) -> Manifest:
        return dataclasses.replace(self, history=(*self.history, expert))

    def without(self, removed: Expert) -> Manifest:
        """The manifest of a ledger without an expert, which `undo` can bring back."""
        place = self.history.index(removed)
        history = [*self.history[:place], *self.history[place + 1 :]]
        for number, entry in enumerate(history):
            if entry.inputs and entry.inputs.after == removed.name:
                history[number] = dataclasses.replace(entry, inputs=dataclasses.replace(entry.inputs, after=""))
        time = datetime.now(timezone.utc).isoformat(timespec="seconds")
        removal = Removal(removed, place, time, history[-1].name if history else "", self.next_number)
        return dataclasses.replace(self._reordered(history), removed=(*self.removed, removal)).forgetting()

    @property
    def last_removal(self) -> Removal | None:
        """What `undo` takes back, if the last command was `remove` and the files of its expert are still there."""
        removal = self.removed[-1] if self.removed else None
        if not removal or not removal.expert.state or removal.after != (self.names or [""])[-1]:
            return None
        calibrated = self.calibrated
        is_older = calibrated and calibrated.inputs and calibrated.inputs.number >= removal.next
        return None if is_older else removal

    def restoring(self, removal: Removal) -> Manifest:
        """The manifest of a ledger before the last removal."""
        history = [*self.history[: removal.place], removal.expert, *self.history[removal.place :]]
        return dataclasses.replace(self._reordered(history), removed=self.removed[:-1])

    def forgetting(self) -> Manifest:
        """The manifest that keeps the files of the last ``keep`` removed experts only; 0 drops replaced inputs too."""
        removed = list(self.removed)
        for number, removal in enumerate(removed[: max(len(removed) - self.keep, 0)]):
            removed[number] = dataclasses.replace(removal, expert=dataclasses.replace(removal.expert, state=""))
        history = list(self.history)
        for number, entry in enumerate(history if not self.keep else ()):
            if entry.inputs:
                history[number] = dataclasses.replace(entry, inputs=dataclasses.replace(entry.inputs, before=None))
        return dataclasses.replace(self, history=tuple(history), removed=tuple(removed))

    def _reordered(self, entries: Sequence[Expert]) -> Manifest:
        """The manifest of a ledger with these experts; their mean norms are recomputed."""
        history: list[Expert] = []
        for entry in entries:
            before = history[-1].mean_norm if history else 0.0
            mean_norm = (len(history) * before + entry.norm) / (len(history) + 1)
            history.append(dataclasses.replace(entry, mean_norm=mean_norm))
        return dataclasses.replace(self, history=tuple(history))

    def replacing(self, old: Expert, new: Expert) -> Manifest:
        return dataclasses.replace(self, history=tuple(new if entry is old else entry for entry in self.history))

    def at(self, step: int) -> Manifest:
        """The manifest as it was after a step."""
        return dataclasses.replace(self, history=self.history[:step])

    def save(self, storage: Storage) -> Manifest:
        """Commit: replace the version that was loaded, or make the first one; StoreBusyError if another writer has.

        If this fails, nothing has changed. Returns the manifest with its new version; `Storage.sync` makes it durable.
        """
        data = {
            "format": FORMAT,
            "step": self.step,
            "method": {"name": self.method, "parameters": dict(self.parameters)},
            "keep": self.keep,
            "max_rank": None,
            "base": self.base.to_json(),
            "history": [dataclasses.asdict(expert) for expert in self.history],
            **({"removed": [dataclasses.asdict(removal) for removal in self.removed]} if self.removed else {}),
            **({"commit": self.commit} if self.commit else {}),
        }
        where = f"{storage}/{MANIFEST}"
        try:
            Manifest.from_json(data, where)
        except MergestreamError as error:
            raise MergestreamError(f"the new manifest could not be read again, and is not written: {error}") from error
        text = to_json({**data, "digest": text_digest(_canonical(data))})
        version = storage.put_if(MANIFEST, text.encode(), self.version)
        return dataclasses.replace(self, version=version)

    @classmethod
    def load(cls, storage: Storage) -> Manifest:
        """Read the manifest as it is now."""
        found, path = storage.fetch(MANIFEST), f"{storage}/{MANIFEST}"
        if found is None:
            remedy = (
                f"make one with: mergestream init {storage} --base MODEL"
                if storage.is_empty
                else f"it has no {MANIFEST}"
            )
            raise MergestreamError(f"{storage} is not a mergestream store; {remedy}")
        try:
            data = parse(found[0].decode(), path)
        except UnicodeDecodeError as error:
            raise damaged(path, "it is not text") from error
        if type(data.get("format")) is not int:
            raise invalid_file(path, "it is not the manifest of a mergestream store")
        if data["format"] not in READABLE:
            raise MergestreamError(
                f"{path} has format {data['format']}, this version of mergestream reads up to {FORMAT}; "
                "upgrade mergestream"
            )
        digest = data.pop("digest", None)
        if digest != text_digest(_canonical(data)):
            raise MergestreamError(f"{path} is damaged or was edited: its digest does not match; {BACKUP}")
        return dataclasses.replace(cls.from_json(data, path), version=found[1])

    @classmethod
    def from_json(cls, data: Mapping[str, Any], path: str) -> Manifest:
        """Parse the content of the file at ``path``."""
        history = validate(data.get("history"), list[dict[str, Any]], path)
        numbered = [{"number": place, **entry} for place, entry in enumerate(history, 1)]
        content = validate({**data, "history": numbered}, _Content, path)
        if len({entry.name for entry in content.history}) < len(history):
            raise invalid_file(path, "two experts have the same name")
        if content.step != len(history):
            raise invalid_file(path, f"it is at step {content.step} with {counted(len(history), 'expert')}")
        found = cls(
            content.method["name"],
            content.method["parameters"],
            BaseModel.from_json(content.base, path),
            content.keep,
            content.history,
            content.removed,
            content.commit,
        )
        if len({entry.number for entry in found.recorded}) < len(found.recorded):
            raise invalid_file(path, "two experts have the same number")
        if strange := [entry for entry in found._numbered if not _MARK.fullmatch(entry.mark)]:
            raise invalid_file(path, f"{strange[0].mark!r} is no mark of files")
        if found.is_ledger:
            if not isinstance(found.parameters.get("budget"), int | float):
                raise invalid_file(path, "it is a ledger without a budget")
            if without := [entry.name for entry in found.recorded if not entry.is_entry]:
                raise invalid_file(path, f"the expert {without[0]!r} has no entry in the ledger")
        return found


class _Chosen(TypedDict):
    name: str
    parameters: dict[str, Plain]


@dataclass(frozen=True)
class _Content:
    """The fields of the file; older stores lack those that have a default."""

    step: int
    method: _Chosen
    keep: Count
    base: dict[str, Any]
    history: tuple[Expert, ...]
    removed: tuple[Removal, ...] = ()
    commit: str = ""
    max_rank: Number | None = None
    """A bound that was dropped in 0.3; older versions need the key"""


def is_store(storage: Storage, folder: str = "") -> bool:
    """Whether a folder is a store, whole or damaged."""
    data = storage.read(f"{folder}/{MANIFEST}".lstrip("/"))
    try:
        return data is not None and isinstance(json.loads(data)["format"], int)
    except (LookupError, TypeError):
        return False
    except (ValueError, RecursionError):
        return "steps" in storage.folders(folder)


def _canonical(data: Mapping[str, Any]) -> str:
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
