"""A store in a bucket on a cluster: the workers write to a directory of this machine, which is uploaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from mergestream import LocalEngine, Store
from tests.cloud.server import BUCKET
from tests.conftest import Toys

COMMANDS = """
import sys, ray
from mergestream.cli import main
ray.init("local", num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1", object_store_memory=80 << 20)
store, expert, other = sys.argv[1:]
sys.exit(main(["add", store, expert, "--engine", "ray"]) or main(["inspect", store, other, "--engine", "ray"]))
"""
"""On a cluster of its own, beside those of other tests; it knows the server by the environment that it starts in"""


def test_a_cluster_writes_to_a_bucket(toys: Toys, tmp_path: Path) -> None:
    place = f"s3://{BUCKET}/stores/ray"
    Store.create(place, toys.base, "ledger")
    subprocess.run([sys.executable, "-c", COMMANDS, place, *map(str, toys.experts[:2])], check=True, timeout=300)
    far = Store(place)
    far.verify()
    near = Store.create(tmp_path / "store", toys.base, "ledger", engine=LocalEngine(1)).add(toys.experts[0])
    assert far.history[0].state == near.state
