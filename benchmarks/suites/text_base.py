"""The ``text-base`` suite: the tasks of ``text`` for a base five times as large, all-mpnet-base-v2.

The first four tasks by default, because an expert takes nine minutes of one core (``--tasks 8`` for all).
"""

from dataclasses import replace

from benchmarks.suites import text
from benchmarks.suites.backbones import MPNet

SUITE = replace(
    text.SUITE,
    name="text-base",
    backbone=MPNet(),
    recipe=replace(text.RECIPE, learning_rate=5e-5),
    count=4,
)
