"""An engine that runs tasks on a Ray cluster whose nodes share a file system; weights never pass through the driver."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import uuid4

from mergestream.engine.base import Result, check_budget
from mergestream.engine.packing import UnpackedWork, pack, unpack
from mergestream.errors import EngineError, MergestreamError, UsageError, first_line
from mergestream.interrupts import own_sigterm
from mergestream.sizes import format_size

SHARES = 8
"""Batches per worker: few are cheaper, many let all workers finish at about the same time"""
GPU_SHARE = 0.25
"""The share of a GPU that a task reserves with --device cuda: while one computes, others read"""
SMALLEST_MEMORY = 1 << 26
"""The least memory that a task reserves"""
REACHABLE = 10.0
"""Seconds in which a cluster must answer"""
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""The first bytes of an HTTP/2 connection, as Ray uses it, with empty settings"""
_SETTINGS = 4
"""The frame type of the answer, its fourth byte"""
LOOKING = 120.0
"""Seconds in which every node must have opened the files"""
WAITING = 5.0
"""Seconds between checks whether the waiting tasks can still run"""


@dataclass(frozen=True)
class Batch:
    """Tensors that one task processes one after another."""

    names: tuple[str, ...]
    memory: int


class Node(NamedTuple):
    id: str
    address: str
    memory: int


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
        self,
        costs: Mapping[str, int],
        work: Callable[[str], Result],
        memory: Mapping[str, int] | None = None,
    ) -> Iterator[tuple[str, Result]]:
        """Ray retries a batch whose worker or node is lost. The first error cancels all other batches."""
        if not costs:
            return
        memory = memory or {}
        ray = connected(self.address)
        packed, collectors = pack(work)
        check_budget(memory, self.max_memory)
        nodes = _nodes(ray)
        _check_room(nodes, {name: memory.get(name, 0) for name in costs})
        run, content = uuid4().hex, ray.put(packed)
        _check_nodes(ray, nodes, run, content)
        workers = self.workers
        waiting = batches(costs, memory, workers)
        running: dict[Any, Batch] = {}
        try:
            while waiting or running:
                for batch in list(waiting):
                    if len(running) >= workers:
                        break
                    used = sum(other.memory for other in running.values())
                    if self.max_memory is None or used + batch.memory <= self.max_memory:
                        waiting.remove(batch)
                        running[self._task(ray, batch).remote(run, content, batch.names)] = batch
                done, _ = ray.wait(list(running), timeout=WAITING)
                if not done:
                    _check_room(_nodes(ray), {batch.names[0]: batch.memory for batch in running.values()})
                for ref in done:
                    results, left = _result(ray, ref, running.pop(ref))
                    for collector, more in zip(collectors, left, strict=True):
                        collector.collect(more)
                    yield from results
        finally:
            for ref in running:
                ray.cancel(ref, force=True)

    def _task(self, ray: Any, batch: Batch) -> Any:
        options: dict[str, Any] = {"num_cpus": 1, "memory": _rounded(batch.memory, _nodes(ray))}
        if self.device == "cuda":
            options["num_gpus"] = GPU_SHARE
        return ray.remote(run_batch).options(**options)


def batches(costs: Mapping[str, int], memory: Mapping[str, int], workers: int) -> list[Batch]:
    """Group tensors into batches, the largest first: large ones alone, small ones up to a share of the total."""
    share = sum(costs.values()) / (workers * SHARES)
    found: list[Batch] = []
    names: list[str] = []
    cost = 0
    for name in sorted(costs, key=lambda name: (-costs[name], name)):
        if names and cost + costs[name] > share:
            found.append(_batch(names, memory))
            names, cost = [], 0
        names.append(name)
        cost += costs[name]
    return [*found, _batch(names, memory)]


def _batch(names: Sequence[str], memory: Mapping[str, int]) -> Batch:
    return Batch(tuple(names), max(memory.get(name, 0) for name in names))


def _rounded(memory: int, nodes: Sequence[Node]) -> int:
    """The memory that a task reserves: a power of two if a node has that, because Ray reuses a worker for tasks with
    the same request."""
    wanted = max(SMALLEST_MEMORY, 1 << (max(memory, 1) - 1).bit_length())
    return min(wanted, max((node.memory for node in nodes), default=wanted))


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
    """Check quickly that a cluster answers: Ray itself would retry for minutes."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if not colon:  # local, auto
        return
    if not port.isdigit():
        raise UsageError(f"{address} is no address of a Ray cluster; ray://HOST:PORT is one")
    try:
        with socket.create_connection((host, int(port)), timeout=REACHABLE) as connection:
            known = os.environ.get("RAY_USE_TLS", "0") != "0" or _greets(connection)
    except (OSError, OverflowError) as error:
        raise EngineError(f"there is no Ray cluster at {address}: {first_line(error)}") from error
    if not known:
        raise EngineError(f"there is no Ray cluster at {address}: what listens there is something else")


def _greets(connection: socket.socket) -> bool:
    connection.sendall(_GREETING)
    with connection.makefile("rb") as answer:
        return answer.read(4)[3:] == bytes([_SETTINGS])


def _nodes(ray: Any) -> list[Node]:
    """The nodes that have CPU cores."""
    return [
        Node(node["NodeID"], node["NodeManagerAddress"], int(node["Resources"].get("memory", 0)))
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get("CPU")
    ]


def _check_room(nodes: Sequence[Node], memory: Mapping[str, int]) -> None:
    largest = max(memory, key=lambda name: memory[name])
    if not nodes:
        raise EngineError("the Ray cluster has no node with a core to work with")
    room = max(node.memory for node in nodes)
    if memory[largest] > room:
        raise EngineError(
            f"tensor {largest} needs {format_size(memory[largest])} of memory to be merged, and no node of the Ray "
            f"cluster has more than {format_size(room)}"
        )


def _check_nodes(ray: Any, nodes: Sequence[Node], run: str, content: Any) -> None:
    """Check that every node has the same versions as the driver and can open all files."""
    from ray.exceptions import GetTimeoutError, RayError, RayTaskError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def looking(node: Node) -> Any:
        placed = NodeAffinitySchedulingStrategy(node.id, soft=False)
        return ray.remote(look).options(num_cpus=0, max_retries=0, scheduling_strategy=placed).remote(run, content)

    here = versions()
    for node, ref in [(node, looking(node)) for node in nodes]:
        try:
            there, fault = ray.get(ref, timeout=LOOKING)
        except GetTimeoutError as error:
            raise EngineError(f"the node {node.address} of the Ray cluster does not answer") from error
        except RayTaskError as error:
            raise EngineError(
                f"the node {node.address} of the Ray cluster cannot run mergestream {here['mergestream']}: "
                f"{first_line(error.cause)}"
            ) from error
        except RayError:  # it is gone: nothing will run there
            continue
        for package, version in here.items():
            if there.get(package) != version:
                raise EngineError(
                    f"the node {node.address} of the Ray cluster has {package} {there.get(package)}, and here it is "
                    f"{version}: results could differ"
                )
        if fault:
            raise EngineError(f"the node {node.address} of the Ray cluster does not see what is needed: {fault}")


def _result(ray: Any, ref: Any, batch: Batch) -> Any:
    from ray.exceptions import RayError, RayTaskError

    try:
        return ray.get(ref)
    except RayTaskError as error:
        raise error.cause or error from error
    except RayError as error:
        others = f" and {len(batch.names) - 1} more" if len(batch.names) > 1 else ""
        raise EngineError(
            f"Ray gave up on the tensor {batch.names[0]}{others}, whose workers were lost again and again "
            f"({type(error).__name__}); what is done stays, run it again"
        ) from error


# --- on a worker ---------------------------------------------------------------------------------------------

_unpacked_work: dict[str, UnpackedWork[Any]] = {}
"""The unpacked work of the current run, so that files are opened once"""


def _unpacked(run: str, packed: bytes) -> UnpackedWork[Any]:
    if run not in _unpacked_work:
        _unpacked_work.clear()
        _unpacked_work[run] = unpack(packed)
    return _unpacked_work[run]


def run_batch(run: str, packed: bytes, names: Sequence[str]) -> tuple[list[tuple[str, Any]], list[Any]]:
    return _unpacked(run, packed).run(names)


def look(run: str, packed: bytes) -> tuple[dict[str, str], str | None]:
    """The versions on this node, and an error message if it cannot open the files."""
    try:
        _unpacked(run, packed)
    except (MergestreamError, OSError) as error:
        return versions(), str(error)
    return versions(), None


def versions() -> dict[str, str]:
    """The versions of the packages that decide the results."""
    import torch

    from mergestream import __version__

    return {"mergestream": __version__, "torch": torch.__version__}
