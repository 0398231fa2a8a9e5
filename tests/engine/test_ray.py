"""The Ray engine, on a cluster of two nodes on this machine: the same bytes, whatever is lost on the way."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from mergestream import LocalEngine, MergestreamError, RayEngine, Store, merge
from mergestream.engine import Engine, ResultsByTensor
from mergestream.engine import ray as engine
from mergestream.engine.ray import pack, run_job, unpack
from mergestream.errors import EngineError, UsageError
from mergestream.interrupts import own_sigterm
from mergestream.testing import save_adapter
from tests.conftest import Toys, files, save_model, toy_base, toy_expert

WEIGHTS = ".safetensors", "digests.json", "factors.json"
NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 << 20, "node_ip_address": "127.0.0.1"}
QUICK = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500, "health_check_failure_threshold": 4}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    import ray
    from ray.cluster_utils import Cluster

    with own_sigterm():
        cluster = Cluster(
            initialize_head=True, head_node_args={**NODE, "include_dashboard": False, "_system_config": QUICK}
        )
        cluster.add_node(**NODE)
    try:
        engine.connected(cluster.address)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def grown(path: Path, toys: Toys, method: str, engine: Any, experts: int = 3) -> Store:
    store = Store.create(path, toys.base, method, engine=engine)
    for expert in toys.experts[:experts]:
        store.add(expert)
    return store


@pytest.mark.parametrize("method", ["opcm", "ledger", "ties", "average"])
def test_a_store_has_the_same_bytes_as_by_the_local_engine(
    method: str, cluster: Any, toys: Toys, tmp_path: Path
) -> None:
    found = {}
    for name, by in {"local": LocalEngine(2), "ray": RayEngine()}.items():
        store = grown(tmp_path / name, toys, method, by)
        store.verify()
        store.export(tmp_path / f"{name}-out")
        found[name] = [
            [(entry.digest, entry.state, entry.record, entry.scale, entry.distance) for entry in store.history],
            files(store.path / "steps", *WEIGHTS),
            files(store.path / "experts"),
            files(tmp_path / f"{name}-out", *WEIGHTS),
        ]
    assert found["ray"] == found["local"]


def test_a_merge_has_the_same_bytes_as_by_the_local_engine(cluster: Any, toys: Toys, tmp_path: Path) -> None:
    engines: dict[str, Engine] = {"local": LocalEngine(1), "ray": RayEngine()}
    for method in ("task_arithmetic", "opcm"):
        for name, by in engines.items():
            merge(toys.base, toys.experts, tmp_path / f"{method}-{name}", method, engine=by)
        one, other = (files(tmp_path / f"{method}-{name}") for name in ("local", "ray"))
        assert one == other


@pytest.mark.parametrize("method", ["opcm", "ledger"])
def test_an_inspection_is_the_same_and_leaves_nothing(method: str, cluster: Any, toys: Toys, tmp_path: Path) -> None:
    place = grown(tmp_path / "place" / "store", toys, method, LocalEngine(1), 2).path
    before = files(place.parent)
    local, ray = (Store(place, engine=by).inspect(toys.experts[2]) for by in (LocalEngine(2), RayEngine(workers=2)))
    assert dataclasses.replace(ray, seconds=local.seconds) == local
    assert files(place.parent) == before and list(place.parent.iterdir()) == [place]


def test_adapters_have_the_same_bytes_as_by_the_local_engine(cluster: Any, toys: Toys, tmp_path: Path) -> None:
    experts = []
    for number in range(2):
        generator = torch.Generator().manual_seed(number)
        a, b = torch.randn(2, 8, generator=generator), torch.randn(16, 2, generator=generator)
        experts.append(save_adapter(tmp_path / f"adapter-{number}", {"layers.0.up": (b, a)}))
    found = []
    for name, by in {"local": LocalEngine(2), "ray": RayEngine()}.items():
        store = grown(tmp_path / name, Toys(toys.base, experts), "opcm", by)
        assert "factors-0002.safetensors" in files(store.path / "steps" / "0002")
        written = store.export_adapter(tmp_path / f"{name}-adapter")
        found.append((files(store.path / "steps", *WEIGHTS), files(tmp_path / f"{name}-adapter", *WEIGHTS), written))
    assert found[0] == found[1]


def test_commands_take_it_by_name(cluster: Any, toys: Toys, tmp_path: Path, done: Callable[..., str]) -> None:
    store, out = tmp_path / "store", tmp_path / "out"
    done("init", store, "--base", toys.base, "--method", "average", "--engine", "ray")
    done("add", store, *toys.experts[:2], "--engine", "ray", "--max-memory", "1GB", "--workers", "2")
    done("verify", store, "--engine", "ray")
    done("export", store, out, "--engine", "ray")
    assert (out / "model.safetensors").is_file()


# --- what is lost on the way ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hesitant:
    """Work that stops on one node, or at one tensor; all other nodes wait for it to do so."""

    work: Callable[[str], Any]
    begun: Path
    node: str | None = None
    name: str | None = None

    def __call__(self, name: str) -> Any:
        import ray

        if ray.get_runtime_context().get_node_id() == self.node or name == self.name:
            self.begun.touch()
            while True:
                time.sleep(60)
        while self.node and not self.begun.exists():
            time.sleep(0.01)
        return self.work(name)


class Disturbed(RayEngine):
    def __init__(self, begun: Path, **stops: str) -> None:
        super().__init__()
        self.begun, self.stops = begun, stops

    def run(self, costs: Mapping[str, int], work: Callable[[str], Any], memory: Any = None) -> Iterator[Any]:
        return super().run(costs, Hesitant(work, self.begun, **self.stops), memory)


def until(condition: Callable[[], object]) -> None:
    while not condition():
        time.sleep(0.02)


def test_what_a_lost_node_was_at_is_done_by_others(cluster: Any, toys: Toys, tmp_path: Path) -> None:
    expected = grown(tmp_path / "expected", toys, "opcm", LocalEngine(1), 2)
    store = grown(tmp_path / "store", toys, "opcm", LocalEngine(1), 1)
    with own_sigterm():
        node = cluster.add_node(**NODE)
    cluster.wait_for_nodes()
    begun = tmp_path / "begun"

    def lose() -> None:
        until(begun.exists)
        cluster.remove_node(node, allow_graceful=False)

    losing = threading.Thread(target=lose)
    losing.start()
    Store(store.path, engine=Disturbed(begun, node=node.node_id)).add(toys.experts[1])
    losing.join()
    assert files(store.path / "steps", *WEIGHTS) == files(expected.path / "steps", *WEIGHTS)


def add_and_stop(address: str, store: Path, expert: Path, begun: Path) -> None:
    import ray

    ray.init(address, log_to_driver=False)
    Store(store, engine=Disturbed(begun, name="temperature")).add(expert)


def test_a_killed_driver_leaves_a_step_that_resumes_here_and_there(cluster: Any, toys: Toys, tmp_path: Path) -> None:
    expected = grown(tmp_path / "expected", toys, "opcm", LocalEngine(1), 2)
    store = grown(tmp_path / "store", toys, "opcm", LocalEngine(1), 1)
    begun, journal = tmp_path / "begun", store.path / "steps" / "0002" / "journal"
    arguments = cluster.address, store.path, toys.experts[1], begun
    child = multiprocessing.get_context("spawn").Process(target=add_and_stop, args=arguments)
    child.start()
    until(lambda: begun.exists() and journal.exists() and journal.read_text().count("\n") > 2)
    os.kill(child.pid or 0, signal.SIGKILL)
    child.join()
    shutil.copytree(store.path, tmp_path / "copy")
    engines: dict[Path, Engine] = {store.path: RayEngine(), tmp_path / "copy": LocalEngine(1)}
    for path, by in engines.items():
        Store(path, engine=by).add(toys.experts[1])
        assert files(path / "steps", *WEIGHTS) == files(expected.path / "steps", *WEIGHTS)
        assert files(path / "experts") == files(expected.path / "experts")


def test_sigterm_is_not_taken_over(cluster: Any) -> None:
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_an_interrupt_cancels_the_tasks(cluster: Any, tmp_path: Path) -> None:
    import ray

    begun = tmp_path / "begun"
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it

    def interrupt() -> None:
        until(begun.exists)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        list(Disturbed(begun, name="a").run({"a": 1}, str.upper))
    signal.signal(signal.SIGINT, before)
    cores = ray.cluster_resources()["CPU"]
    until(lambda: ray.available_resources().get("CPU") == cores)


def test_an_error_is_raised_as_it_is_and_ends_all(cluster: Any, toys: Toys, tmp_path: Path) -> None:
    broken = toy_expert(1)
    broken["half.weight"][0, 0] = float("nan")
    expert = save_model(tmp_path / "broken", broken)
    store = grown(tmp_path / "store", toys, "opcm", RayEngine(), 1)
    with pytest.raises(MergestreamError, match=r"half\.weight.* holds NaN or Inf"):
        store.add(expert)
    assert not (store.path / "steps" / "0002").exists()


# --- sentences -----------------------------------------------------------------------------------------------


def test_a_path_that_a_node_does_not_see_is_told_before_any_work(cluster: Any, toys: Toys, tmp_path: Path) -> None:
    ran = tmp_path / "ran"

    class Elsewhere:
        def __reduce__(self) -> Any:
            return Path.read_bytes, (tmp_path / "not there",)

    here = Elsewhere()

    def work(name: str) -> Elsewhere:
        ran.touch()
        return here

    with pytest.raises(EngineError, match=r"the node 127.0.0.1 of the Ray cluster cannot take part: .*not there"):
        list(RayEngine().run({"a": 1}, work))
    assert not ran.exists()


def test_other_versions_are_refused(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "versions", lambda: "torch 0.4")
    with pytest.raises(
        EngineError, match=r"has mergestream .* torch \d.*, and the driver has torch 0.4: results could"
    ):
        list(RayEngine().run({"a": 1}, str.upper))


def test_a_tensor_that_fits_no_node_is_refused(cluster: Any) -> None:
    with pytest.raises(MergestreamError, match=r"tensor a needs .* more than .* that a node of the Ray cluster has"):
        list(RayEngine().run({"a": 1}, str.upper, {"a": 1 << 50}))
    with pytest.raises(MergestreamError, match=r"more than the .* allowed; raise --max-memory"):
        list(RayEngine(max_memory=10).run({"a": 1}, str.upper, {"a": 11}))


def test_what_is_in_memory_cannot_be_worked_on_elsewhere(cluster: Any, toys: Toys, tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store", toys.base, "opcm", engine=RayEngine())
    with pytest.raises(UsageError, match="other processes cannot see a model in memory"):
        store.add(toy_expert(1), "one")


def test_a_cluster_that_is_not_there_is_told_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(EngineError, match=r"there is no Ray cluster at ray://127.0.0.1:1: "):
        RayEngine("ray://127.0.0.1:1").workers  # noqa: B018
    with pytest.raises(UsageError, match="ray://here:now is no address of a Ray cluster"):
        RayEngine("ray://here:now").workers  # noqa: B018


def test_ray_is_asked_for_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(UsageError, match=r"pip install 'mergestream\[ray\]'"):
        list(RayEngine().run({"a": 1}, str.upper))


def test_ray_chooses_the_gpu() -> None:
    with pytest.raises(UsageError, match="use --device cuda"):
        RayEngine(device="cuda:1")


# --- parts ---------------------------------------------------------------------------------------------------


def test_findings_are_gathered_by_a_copy_and_come_home() -> None:
    findings = ResultsByTensor[int]({"before": 0})

    def work(name: str) -> str:
        findings[name] = len(name)
        return name.upper()

    packed, originals = pack(work)
    assert len(originals) == 1 and originals[0] is findings
    assert run_job("run", packed, "a") == ("A", [{"a": 1}])
    assert run_job("run", packed, "bb") == ("BB", [{"bb": 2}])
    assert findings == {"before": 0}


def test_files_that_have_changed_are_not_taken_for_the_same(toys: Toys, tmp_path: Path) -> None:
    from mergestream.checkpoints import open_checkpoint

    place = save_model(tmp_path / "model", toy_base())
    with open_checkpoint(place) as checkpoint:
        packed, _ = pack(checkpoint.read)
        assert unpack("one run", packed)[0]("mask").all()
        save_model(place, toy_expert(1))
        with pytest.raises(MergestreamError, match="has other files on this machine"):
            unpack("another run", packed)
