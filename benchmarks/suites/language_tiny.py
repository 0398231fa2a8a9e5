"""The ``language-tiny`` suite: the tasks of ``language`` for stories15M, whose experts are full fine-tunes."""

from dataclasses import replace

from benchmarks.suites import language
from benchmarks.suites.causal import STORIES
from benchmarks.suites.training import Recipe

SUITE = replace(
    language.SUITE,
    name="language-tiny",
    backbone=STORIES,
    recipe=Recipe(samples=4000, epochs=1, batch_size=16, learning_rate=1e-4),
)
