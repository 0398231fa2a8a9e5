"""An engine that runs tasks on a Ray cluster whose nodes share a file system; weights never pass through the driver.

The work is packed once, with everything it needs. cloudpickle packs closures; objects with open files are packed as
paths, and opened again when the work is unpacked.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any
from uuid import uuid4

from mergestream.engine.base import Collector, Result, check_budget
from mergestream.engine.local import keep_freed_memory, single_threaded
from mergestream.errors import EngineError, UsageError, first_line
from mergestream.interrupts import own_sigterm

GPU_SHARE = 0.25
"""The share of a GPU that a task reserves with --device cuda: while one computes, others read"""
REACHABLE = 10.0
"""Seconds in which a cluster must accept a connection"""
CHECKING = 120.0
"""Seconds in which every node must have opened the files"""


class RayEngine:
    """Runs work on the Ray cluster at ``address``, at ``RAY_ADDRESS``, or on a local one.

    Each task is on one thread, so that results are the same, bit for bit, as those of the local engine.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        workers: int | None = None,
        max_memory: int | None = None,
        device: str = "cpu",
    ) -> None:
        """``workers`` is how many tasks run at a time (as many as the cluster has cores), ``max_memory`` what all of
        them take together."""
        if device not in ("cpu", "cuda"):
            raise UsageError(f"--device {device}: Ray gives each task its GPU; use --device cuda")
        self.address, self.max_memory, self.device = address, max_memory, device
        self._workers = workers

    @property
    def workers(self) -> int:
        return self._workers or int(connected(self.address).cluster_resources().get("CPU", 1))

    def run(
        self, costs: Mapping[str, int], work: Callable[[str], Result], memory: Mapping[str, int] | None = None
    ) -> Iterator[tuple[str, Result]]:
        """Ray retries a task whose worker or node is lost. The first error cancels all other tasks."""
        if not costs:
            return
        memory = memory or {}
        ray = connected(self.address)
        packed, collectors = pack(work)
        check_budget(memory, self.max_memory)
        room = max(int(node["Resources"].get("memory", 0)) for node in _nodes(ray))
        check_budget(memory, room, "that a node of the Ray cluster has")  # Ray would wait for a larger one
        run, content = uuid4().hex, ray.put(packed)
        _check_nodes(ray, run, content)
        workers = self.workers
        waiting = sorted(costs, key=lambda name: (-costs[name], name))
        running: dict[Any, str] = {}
        gpu = {"num_gpus": GPU_SHARE} if self.device == "cuda" else {}
        try:
            while waiting or running:
                for name in list(waiting):
                    needed, used = memory.get(name, 0), sum(memory.get(other, 0) for other in running.values())
                    if len(running) >= workers:
                        break
                    if self.max_memory is None or used + needed <= self.max_memory:
                        waiting.remove(name)
                        task = ray.remote(run_job).options(num_cpus=1, memory=needed, **gpu)
                        running[task.remote(run, content, name)] = name
                (done,), _ = ray.wait(list(running))
                name = running.pop(done)
                result, left = _result(ray, done, name)
                for collector, more in zip(collectors, left, strict=True):
                    collector.collect(more)
                yield name, result
        finally:
            for ref in running:
                ray.cancel(ref, force=True)


def pack(work: Callable[[str], Any]) -> tuple[bytes, list[Collector]]:
    """The work as bytes, and its collectors, in the order in which `unpack` returns their copies."""
    from ray import cloudpickle

    collectors: list[Collector] = []
    pickler: Any = cloudpickle.Pickler  # not annotated

    class Packer(pickler):  # type: ignore[misc]
        def reducer_override(self, item: Any) -> Any:
            if isinstance(item, Collector):
                collectors.append(item)
            return super().reducer_override(item)

    packed = io.BytesIO()
    packer: Any = Packer(packed)
    packer.dump(versions())
    packer.dump(Path.cwd())
    packer.dump(work)
    packer.dump(list(collectors))  # by reference: one packer dumps each object once
    return packed.getvalue(), collectors


# --- the cluster ---------------------------------------------------------------------------------------------


def connected(address: str | None) -> Any:
    """Import ray and connect it to the cluster at the address, unless it is connected already."""
    try:
        import ray
    except ImportError as error:
        raise UsageError("--engine ray needs the package ray: pip install 'mergestream[ray]'") from error
    if ray.is_initialized():
        return ray
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    _check_reachable(address)
    options: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster that we start sends no usage statistics
    try:
        with own_sigterm():  # Ray's would end the process without our clean-up
            ray.init(address, logging_level=logging.ERROR, log_to_driver=False, **options)
    except Exception as error:  # Ray raises many types for an unusable cluster
        raise EngineError(f"the Ray cluster at {address} cannot be used: {first_line(error)}") from error
    return ray


def _check_reachable(address: str) -> None:
    """Check quickly that something listens at the address: Ray itself would retry for minutes."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if not colon:  # local, auto
        return
    if not port.isdigit():
        raise UsageError(f"{address} is no address of a Ray cluster; ray://HOST:PORT is one")
    try:
        socket.create_connection((host, int(port)), timeout=REACHABLE).close()
    except (OSError, OverflowError) as error:
        raise EngineError(f"there is no Ray cluster at {address}: {first_line(error)}") from error


def _nodes(ray: Any) -> list[dict[str, Any]]:
    """The nodes that have CPU cores."""
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    if not nodes:
        raise EngineError("the Ray cluster has no node with a core to work with")
    return nodes


def _check_nodes(ray: Any, run: str, content: Any) -> None:
    """Check that every node has the same versions as the driver and can open all files."""
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    checks = {}
    for node in _nodes(ray):
        placed = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        task = ray.remote(check_node).options(num_cpus=0, max_retries=0, scheduling_strategy=placed)
        checks[task.remote(run, content)] = node["NodeManagerAddress"]
    for ref, address in checks.items():
        try:
            ray.get(ref, timeout=CHECKING)
        except RayError as error:
            reason = first_line(getattr(error, "cause", None) or error)
            raise EngineError(f"the node {address} of the Ray cluster cannot take part: {reason}") from error


def _result(ray: Any, ref: Any, name: str) -> Any:
    from ray.exceptions import RayError, RayTaskError

    try:
        return ray.get(ref)
    except RayTaskError as error:
        raise error.cause or error from error
    except RayError as error:
        reason = f"its workers were lost several times ({type(error).__name__})"
        raise EngineError(f"Ray gave up on the tensor {name}: {reason}; run the command again, it resumes") from error


# --- on a worker ---------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)  # files are opened once in a run
def unpack(run: str, packed: bytes) -> tuple[Callable[[str], Any], list[Collector]]:
    """Restore the work and the copies of its collectors in a worker process, in the driver's directory."""
    unpickler = pickle.Unpickler(io.BytesIO(packed))
    if (there := unpickler.load()) != (here := versions()):
        raise EngineError(f"it has {here}, and the driver has {there}: results could differ")
    with suppress(OSError):  # if the directory is missing here, so are the paths relative to it
        os.chdir(unpickler.load())
    return unpickler.load(), unpickler.load()


def run_job(run: str, packed: bytes, name: str) -> tuple[Any, list[Any]]:
    """Run the work on a tensor; returns its result, and what each collector has collected."""
    work, collectors = unpack(run, packed)
    keep_freed_memory()
    with single_threaded():
        result = work(name)
    return result, [collector.collected() for collector in collectors]


def check_node(run: str, packed: bytes) -> None:
    """Raise an error if this node has other versions than the driver, or cannot open the files."""
    unpack(run, packed)


def versions() -> str:
    """The versions of the packages that decide the results."""
    import torch

    from mergestream import __version__

    return f"mergestream {__version__} with torch {torch.__version__}"
