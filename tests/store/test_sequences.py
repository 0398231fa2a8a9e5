"""Any sequence of add, undo, kill, resume and refusal leaves what an undisturbed store would hold, to the byte."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from mergestream import LAWA, OPCM, TIES, Ledger, LocalEngine, MergestreamError, Method, Store
from mergestream.merging.step import Step
from mergestream.storage.local import LocalStorage
from mergestream.store import Expert, Manifest
from mergestream.store import add as adding
from mergestream.store.add import add_expert
from mergestream.store.steps import StepWriter
from tests.conftest import Toys, files, save_model, toy_expert
from tests.handmade import handmade_adapter

KEEP = 2
MODULES = {"layers.0.q": (8, 8), "layers.0.up": (16, 8)}
METHODS = [OPCM(), LAWA(window=2), TIES(), Ledger(budget=8)]
"""With a state in factors, with slots that come and go, and with thresholds of the state before"""

Place = tuple[object, str]
"""Where an operation is killed: at the call of a function, by its owner and its name"""
COMMITTING: Place = (Manifest, "save")
PRUNING: Place = (LocalStorage, "folders")
TIDYING: Place = (LocalStorage, "delete")
BEFORE_IT_COUNTS: list[Place] = [
    (Step, "absorb"),
    (StepWriter, "record"),
    (StepWriter, "finish"),
    (adding, "write_record"),
    COMMITTING,
]


class Killed(BaseException):
    """As little prepared for as a signal."""


def is_killed(operation: Callable[[], object], place: Place, after: int = 0) -> bool:
    """Let an operation die at a call of a function, after so many that go well; whether it got there. What is called
    before and after a commit alike, to tidy up, is left alone until then."""
    owner, name = place
    original: Callable[..., Any] = getattr(owner, name)
    save = Manifest.save
    left = after
    counts = place not in (PRUNING, TIDYING)

    def committing(*arguments: Any) -> Manifest:
        nonlocal counts
        saved = save(*arguments)
        counts = True
        return saved

    def dying(*arguments: Any, **options: Any) -> Any:
        nonlocal left
        if counts and left == 0:
            raise Killed
        left -= counts
        return original(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Manifest, "save", committing)
        patch.setattr(owner, name, dying)
        try:
            operation()
        except Killed:
            return True
    return False


def refuse(candidate: adding.Candidate) -> Expert:
    raise MergestreamError("not good enough")


def entries(store: Store) -> list[Expert]:
    """The history, but for when it was made and how long it took."""
    return [dataclasses.replace(entry, added="", seconds=0) for entry in store.history]


def step_name(number: int) -> str:
    return f"{number:04d}"


class Sequences(RuleBasedStateMachine):
    """A store to which things happen, beside what we expect of it."""

    toys: Toys
    """Two dense experts, and two adapters"""
    undisturbed: Path
    """A store for every method and history that was met, to which nothing ever happened"""

    @initialize(method=st.sampled_from(METHODS))
    def create(self, method: Method) -> None:
        self.place = Path(tempfile.mkdtemp(dir=self.undisturbed.parent))
        self.method = method
        self.history: tuple[int, ...] = ()
        self.kept: set[int] = set()
        """The steps on disk that count"""
        self.tidied = True
        """Whether the last operation came to its end: else it may have left something for the next to remove"""
        Store.create(self.place / "store", self.toys.base, method, keep=KEEP, engine=LocalEngine(workers=1))

    def teardown(self) -> None:
        if hasattr(self, "place"):
            shutil.rmtree(self.place)

    def open(self) -> Store:
        return Store(self.place / "store", engine=LocalEngine(workers=1))

    def open_to_write(self) -> Store:
        self.prune()
        return self.open()

    def add_to(self, store: Store, expert: int) -> None:
        store.add(self.toys.experts[expert], allow_duplicate=True)

    def expected(self, history: tuple[int, ...]) -> Store:
        path = self.undisturbed / f"{METHODS.index(self.method)}-{''.join(map(str, history))}"
        if not path.exists():
            if history:
                before = self.expected(history[:-1])
                store = Store(shutil.copytree(before.path, path), engine=LocalEngine(workers=1))
                self.add_to(store, history[-1])
            else:
                Store.create(path, self.toys.base, self.method, keep=KEEP, engine=LocalEngine(workers=1))
        return Store(path)

    def counts(self, history: tuple[int, ...], killed_at: Place | None = None) -> None:
        """What an operation has made real; one that was killed then has not removed all that is not needed any more."""
        step = len(history)
        self.kept = {number for number in self.kept | {step} if 1 <= number <= step}
        self.history, self.tidied = history, killed_at is None
        if killed_at != PRUNING:
            self.prune()

    def prune(self) -> None:
        """What every operation that may write begins with, too."""
        if not self.method.cut(1):
            self.kept = {number for number in self.kept if number >= len(self.history) - KEEP}

    @property
    def can_undo(self) -> bool:
        return len(self.history) == 1 or len(self.history) - 1 in self.kept

    @rule(expert=st.integers(0, 3))
    def add(self, expert: int) -> None:
        """Also what resumes an addition that was cut short."""
        self.add_to(self.open_to_write(), expert)
        self.counts((*self.history, expert))

    @rule(expert=st.integers(0, 3), place=st.sampled_from(BEFORE_IT_COUNTS), after=st.integers(0, 3))
    def add_killed(self, expert: int, place: Place, after: int) -> None:
        once_a_tensor = place in BEFORE_IT_COUNTS[:2]
        if is_killed(lambda: self.add_to(self.open_to_write(), expert), place, after if once_a_tensor else 0):
            self.tidied = False
        else:  # fewer tensors were left to do
            self.counts((*self.history, expert))

    @rule(expert=st.integers(0, 3), place=st.sampled_from([PRUNING, TIDYING]))
    def add_killed_when_it_counts(self, expert: int, place: Place) -> None:
        assert is_killed(lambda: self.add_to(self.open_to_write(), expert), place)
        self.counts((*self.history, expert), killed_at=place)

    @rule(expert=st.integers(0, 3))
    def add_refused_by_a_review(self, expert: int) -> None:
        with pytest.raises(MergestreamError, match="not good enough"):
            add_expert(self.open_to_write(), self.toys.experts[expert], allow_duplicate=True, review=refuse)

    @precondition(lambda self: self.history)
    @rule()
    def add_refused_as_a_duplicate(self) -> None:
        with pytest.raises(MergestreamError, match="has been absorbed already"):
            self.open_to_write().add(self.toys.experts[self.history[0]])

    @rule()
    def relocate(self) -> None:
        self.open_to_write().relocate(self.toys.base)

    @precondition(lambda self: self.history)
    @rule()
    def undo(self) -> None:
        if not self.can_undo:
            with pytest.raises(MergestreamError, match="used up"):
                self.open_to_write().undo()
        else:
            self.open_to_write().undo()
            self.counts(self.history[:-1])

    @precondition(lambda self: self.history and self.can_undo)
    @rule()
    def undo_killed(self) -> None:
        assert is_killed(lambda: self.open_to_write().undo(), COMMITTING)
        self.tidied = False

    @precondition(lambda self: self.history and self.can_undo)
    @rule()
    def undo_killed_when_it_counts(self) -> None:
        assert is_killed(lambda: self.open_to_write().undo(), PRUNING)
        self.counts(self.history[:-1], killed_at=PRUNING)

    @invariant()
    def it_is_the_undisturbed_store(self) -> None:
        store, expected = self.open(), self.expected(self.history)
        store.verify()
        assert entries(store) == entries(expected)
        for number in range(1, len(self.history) + 1):
            record = Path("experts") / step_name(number)
            assert files(store.path / record) == files(expected.path / record)
        for number in self.kept:
            step = Path("steps") / step_name(number)
            undisturbed = self.expected(self.history[:number]).path
            assert files(store.path / step, ".safetensors", "s.json") == files(undisturbed / step)

    @invariant()
    def nothing_is_left_over(self) -> None:
        if self.tidied:
            store = self.place / "store"
            steps = {f"steps/{step_name(number)}" for number in self.kept}
            experts = {f"experts/{step_name(number)}" for number in range(1, len(self.history) + 1)}
            assert {str(path.relative_to(store)) for path in store.glob("*/*")} == steps | experts
            assert {path.name for path in store.iterdir()} <= {"manifest.json", "lock", "steps", "experts"}
            assert not [path for path in store.rglob("*") if path.name in ("plan.json", "journal")]


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Toys:
    place = tmp_path_factory.mktemp("sequences")
    generator = torch.Generator().manual_seed(0)
    base = {f"{name}.weight": torch.randn(shape, generator=generator) for name, shape in MODULES.items()}
    base |= {"embed.weight": torch.randn(6, 4, generator=generator).bfloat16(), "norm.weight": torch.ones(8)}
    return Toys(
        save_model(place / "base", base),
        [save_model(place / f"expert-{number}", toy_expert(number, base)) for number in (1, 2)]
        + [handmade_adapter(place / f"adapter-{number}", number, modules=MODULES) for number in (1, 2)],
    )


def test_any_sequence_equals_the_undisturbed_store(toys: Toys, tmp_path: Path) -> None:
    (tmp_path / "undisturbed").mkdir()

    class Here(Sequences):
        pass

    Here.toys, Here.undisturbed = toys, tmp_path / "undisturbed"
    run_state_machine_as_test(Here, settings=settings(max_examples=40, stateful_step_count=12))
