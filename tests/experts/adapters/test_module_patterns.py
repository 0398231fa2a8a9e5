"""rank_pattern and alpha_pattern: what `re` says, as PEFT asks it, in bounded time."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergestream.errors import MergestreamError
from mergestream.experts.adapters.module_patterns import PatternTable

PARTS = [
    *(
        "a",
        "b",
        ".",
        r"\.",
        r"\d",
        r"\w+",
        r"\S",
        "[ab]",
        "[^a]",
        "[a-c0-9]*",
        r"[\W_]",
        r"[^\d.]",
        "^",
        "$",
        "a?",
        "x{0}",
    ),
    *("(a|b)", "(a|ab)", "(a*)*", "(a+)+", "(?:ab){2}", "(a|){3}", "b{1,2}", "(^|a)*", r"(?:a|b|\.)+?", "a|b"),
]


@settings(max_examples=200)
@given(st.lists(st.sampled_from(PARTS), min_size=1, max_size=4).map("".join), st.text("ab.0_", max_size=9))
def test_as_peft_does_it(key, module):
    assert bool(PatternTable({key: 1}).get(module, 0)) == bool(re.match(rf"(.*\.)?({key})$", module))


def test_the_first_that_matches_counts():
    table = PatternTable({"q_proj": 1, r"layers\.[01]\.(q|k)_proj": 2, "^model": 3})
    found = [table.get(name, 0) for name in ("model.layers.0.q_proj", "model.layers.1.k_proj", "model", "a.model")]
    assert found == [1, 2, 3, 0]


@pytest.mark.parametrize("key", ["(", "[", "a{99999999999}", "(?i)a", "(?=a)b", r"(a)\1", r"\bq_proj", "a" * 2000])
def test_what_cannot_be_honoured_is_told(key):
    with pytest.raises(ValueError, match=r"\w"):
        PatternTable({key: 1})


@pytest.mark.parametrize("key", ["(a+)+$", "(a|a)*b", "(a?){40}a{40}b"])
def test_what_takes_re_for_ever_takes_a_moment(key):
    assert PatternTable({f"{key}x": 1}).get("a" * 60, 0) == 0


def test_what_takes_too_long_is_refused(monkeypatch):
    monkeypatch.setattr("mergestream.experts.adapters.module_patterns.MAX_STEPS", 1000)
    with pytest.raises(MergestreamError, match="takes too long"):
        PatternTable({"(((.*)*)*)*x": 1}).get("a" * 500, 0)
    with pytest.raises(MergestreamError, match="whose name is too long"):
        PatternTable({"a": 1}).get("a" * 2000, 0)
