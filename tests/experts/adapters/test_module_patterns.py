"""rank_pattern and alpha_pattern match as in PEFT, in bounded time."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergestream.errors import MergestreamError
from mergestream.experts.adapters.module_patterns import PatternTable

PARTS = [
    *("a", "b", ".", r"\.", r"\d", r"\w+", r"\S", "[ab]", "[^a]", "[]a]", "[a-c0-9]*", r"[\W_]", r"[^\d.]", "^", "$"),
    *("a?", "(a|b)", "(a|ab)", "(a|)", "(^|a)", r"(?:a|b|\.)", "a|b", "b+?", "((a|b)|c)"),
]


@settings(max_examples=200)
@given(st.lists(st.sampled_from(PARTS), min_size=1, max_size=3).map("".join), st.text("ab.0_", max_size=9))
def test_a_module_matches_as_in_peft(key: str, module: str) -> None:
    assert bool(PatternTable({key: 1}).get(module, 0)) == bool(re.match(rf"(.*\.)?({key})$", module))


def test_the_first_match_counts() -> None:
    table = PatternTable({"q_proj": 1, r"layers\.[01]\.(q|k)_proj": 2, "^model": 3})
    found = [table.get(name, 0) for name in ("model.layers.0.q_proj", "model.layers.1.k_proj", "model", "a.model")]
    assert found == [1, 2, 3, 0]


@pytest.mark.parametrize(
    "key",
    [
        "(",
        "[",
        "a{99999999999}",
        "(?i)a",
        "(?=a)b",
        r"(a)\1",
        r"\bq_proj",
        "(a+)+$",
        "(?:a|a)*b",
        "(a|aa){,60}b",
        "(?:ab){2}",
        "(?:ab)?",
        "b{1,2}",
        "(a)?" * 30,
        "a" * 2000,
    ],
)
def test_an_unsupported_expression_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        PatternTable({key: 1})


@pytest.mark.parametrize("key", ["a*" * 5, "(a|aa)" * 30, "a?" * 40, "((a|aa)|a)" * 20, "(a|b+|cc)" * 20])
def test_an_expression_with_too_many_ways_to_match_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="too long to match"):
        PatternTable({key: 1})


def test_every_layer_may_be_an_alternative() -> None:
    layers = "|".join(map(str, range(100)))
    table = PatternTable({rf"model\.layers\.({layers})\..*_proj": 4})
    assert table.get("model.layers.73.self_attn.q_proj", 8) == 4
    assert table.get("model.layers.100.self_attn.q_proj", 8) == 8


def test_the_slowest_expression_takes_seconds() -> None:
    start = time.process_time()
    assert PatternTable({".*.*.*.*x": 1}).get("a" * 200, 0) == 0
    assert time.process_time() - start < 10


def test_a_table_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mergestream.experts.adapters.module_patterns.MAX_SECONDS", -1.0)
    with pytest.raises(MergestreamError, match="takes too long"):
        PatternTable({"b": 1}).get("a", 0)


def test_a_name_that_is_too_long_is_refused() -> None:
    with pytest.raises(MergestreamError, match="whose name is too long"):
        PatternTable({"a": 1}).get("a" * 2000, 0)
