"""kill -9 at any moment of adding an adapter: the store is at the old or the new step, and ends with the same bytes."""

import shutil

import pytest

from mergestream import OPCM, Store
from tests.handmade import handmade_adapter
from tests.store.test_crash import add, dies, one_worker, state


@pytest.mark.slow
def test_add_killed_at_every_change_of_the_disk(tmp_path, toys):
    modules = {"layers.0.q": (8, 8), "layers.0.up": (16, 8)}
    adapters = [handmade_adapter(tmp_path / f"a{seed}", seed, modules=modules) for seed in range(3)]

    def make_store(place, count):
        store = Store.create(place, toys.base, OPCM(), engine=one_worker())
        for adapter in adapters[:count]:
            store.add(adapter)
        return place

    start, expected = make_store(tmp_path / "start", 2), make_store(tmp_path / "expected", 3)
    steps = set()
    for number in range(1, 300):
        work = tmp_path / "work"
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(start, work)
        died = dies(number, add, work, adapters[2])
        store = Store(work, engine=one_worker())
        store.verify()
        steps.add(store.manifest.step)
        if store.manifest.step == 2:
            store.add(adapters[2])
            store.verify()
        assert state(work) == state(expected)
        if not died:
            break
    else:
        raise AssertionError("it never succeeds")
    assert steps == {2, 3}
    assert number > 20
