import errno
import json
import os
from pathlib import Path

import pytest

from mergestream import Store
from mergestream.digest import json_digest
from mergestream.errors import MergestreamError, MergestreamWarning
from tests.report.conftest import EXPERTS, SCORES


def test_scores_come_back_with_acc_and_bwt(scored: Store) -> None:
    found = Store(scored.path).scores
    assert found is not None
    assert found.tasks == EXPERTS and found.matrix == tuple(map(tuple, SCORES))
    assert found.base == (0.2, 0.3, 0.4) and found.experts == (0.95, 0.97, 0.9)
    assert found.acc == pytest.approx((0.7 + 0.85 + 0.8) / 3)
    assert found.bwt == pytest.approx(((0.7 - 0.9) + (0.85 - 0.95)) / 2)


def test_scores_that_are_there_are_no_error(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(type(store.storage), "sync", failing)
    with pytest.warns(MergestreamWarning, match=r"scores\.json is written, but may not survive a power cut"):
        store.attach_scores(["cars"], [[0.9]])
    assert store.scores is not None and store.scores.matrix == ((0.9,),)


def test_a_store_without_scores_has_none(store: Store) -> None:
    assert store.scores is None


def test_scores_of_steps_that_were_taken_back_are_not_shown(store: Store, models: Path) -> None:
    store.attach_scores(["cars", "digits"], [[0.9, 0.1], [0.8, 0.9]])
    store.undo()
    assert store.scores is not None and store.scores.matrix == ((0.9, 0.1),)
    store.add(models / "pets")
    assert store.scores is not None and store.scores.matrix == ((0.9, 0.1),)
    assert store.scores.bwt is None


def test_entries_may_be_missing(store: Store) -> None:
    scores = store.attach_scores(["cars", "digits"], [[0.9, None], [None, 0.9]])
    assert scores.acc is None and scores.bwt is None


@pytest.mark.parametrize(
    ("tasks", "matrix", "message"),
    [
        (["a", "b", "c"], [[0.1] * 3] * 3, "which has 2 experts"),
        (["a", "b"], [], "0 rows"),
        (["a"], [[0.1], [0.1]], "at least one task per step"),
        (["a", "b"], [[0.1, 0.2], [0.1]], "1 entries for 2 tasks"),
        (["a", "b"], [[0.1, float("nan")]], "finite numbers"),
    ],
)
def test_what_does_not_fit_is_refused(store: Store, tasks: list[str], matrix: list[list[float]], message: str) -> None:
    with pytest.raises(MergestreamError, match=message):
        store.attach_scores(tasks, matrix)
    assert store.scores is None


def test_a_damaged_file_is_named(store: Store) -> None:
    store.attach_scores(["cars", "digits"], [[0.9, 0.1]])
    path = store.path / "scores.json"
    path.write_text(path.read_text().replace("0.9", "0.99"))
    with pytest.raises(MergestreamError, match=r"scores\.json is damaged"):
        _ = store.scores


def test_a_file_without_rows_is_named(store: Store) -> None:
    store.attach_scores(["cars", "digits"], [[0.9, 0.1]])
    path = store.path / "scores.json"
    data = json.loads(path.read_text())
    del data["digest"]
    path.write_text(json.dumps({**data, "matrix": [], "digest": json_digest({**data, "matrix": []})}))
    with pytest.raises(
        MergestreamError, match=r"scores\.json was not written by mergestream: there are no rows of scores"
    ):
        _ = store.scores
