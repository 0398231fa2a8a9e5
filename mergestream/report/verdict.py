"""The first sentence of a report: what was merged, how good it is as far as is known, and what to look at."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mergestream.report.ledger import DAMAGED
from mergestream.report.metrics import mean
from mergestream.sizes import counted

if TYPE_CHECKING:
    from mergestream.report.facts import Facts
    from mergestream.report.ledger import LedgerFacts
    from mergestream.report.scores import Scores

LOST = 0.1
"""A task that has lost more than this share of what its expert scores alone deserves a look."""


def verdict(facts: Facts) -> str:
    if not facts.history:
        return "Nothing is merged yet: add the first expert (mergestream add)."
    count = len(facts.history)
    merged = f"{counted(count, 'expert')} {'is' if count == 1 else 'are'} merged by {facts.manifest.method}"
    return f"{merged}: {_quality(facts)}; {_attention(facts)}."


def signed(value: float, form: str = ".3f") -> str:
    """With its sign, and a minus as long as the plus."""
    return format(value, f"+{form}").replace("-", "−")


def bwt_in_words(bwt: float) -> str:
    """Which way round BWT, a mean over tasks, is to be read."""
    return f"{'below 0: forgotten' if bwt < 0 else 'not below 0: nothing forgotten'} since their own experts came"


def _quality(facts: Facts) -> str:
    if facts.scores:
        return _scored(facts, facts.scores)
    found = _held(facts, facts.ledger) if facts.ledger else _kept(facts)
    last = facts.history[-1].evaluation
    return f"the model scored {last['score']:g} when the last one came, and {found}" if last else found


def _scored(facts: Facts, scores: Scores) -> str:
    """By the scores, the best there is to know."""
    when = "" if len(scores.matrix) == len(facts.history) else f"after step {len(scores.matrix)} "
    found = scores.compared()
    merged = mean([task.merged for task in found])
    alone, base = mean([task.expert for task in found]), mean([task.base for task in found])
    if merged is None:
        return f"{when}the model was not scored on all tasks"
    before = "" if base is None else f"; the base has {base:.3g}"
    if alone is None or alone <= 0 or merged < 0:
        return f"{when}the model has a mean {scores.metric} of {merged:.3g}{before and f' ({before[2:]})'}"
    return (
        f"{when}the model keeps {merged / alone:.0%} of what they score alone "
        f"({scores.metric} {merged:.3g} against {alone:.3g} in the mean{before})"
    )


def _held(facts: Facts, ledger: LedgerFacts) -> str:
    """By what a ledger predicts, without data."""
    held = f"the ledger holds {_range(ledger.held, '.0%')} of each"
    known = [value for value in ledger.damage if value is not None]
    if facts.manifest.adapters:
        return f"{held}, and of adapters only scores tell how good the model is"
    return f"{held} and predicts a damage of {_range(known, '.2f')} (0 is none, 1 the base)" if known else held


def _kept(facts: Facts) -> str:
    """By what entered the state, and how alike the experts are."""
    kept = f"{_range([entry.kept for entry in facts.history], '.0%')} of each entered"
    cosines = [value for value, _, _ in facts.similarity.pairs()]
    return f"{kept}, at cosines of {_range(cosines, '.2f')} to each other" if cosines else kept


def _range(values: list[float] | tuple[float, ...], form: str) -> str:
    least, most = (format(value + 0.0, form).replace("-", "−") for value in (min(values), max(values)))
    return least if least == most else f"{least} to {most}"


def _attention(facts: Facts) -> str:
    """The first thing to look at."""
    worst = max(facts.scores.compared(), key=lambda task: task.lost) if facts.scores else None
    if worst and worst.lost > LOST:
        return f"look at {worst.task} first, which has {worst.merged:.3g} where its expert has {worst.expert:.3g}"
    damaged = facts.ledger and not facts.manifest.adapters and facts.ledger.interference.largest_damage
    if damaged and damaged[0] > DAMAGED:
        return f"look at {damaged[1]} first, which would be served badly (predicted damage {damaged[0]:.2f})"
    if facts.conflicts:
        worst_pair = facts.conflicts[0]
        return f"look at {worst_pair.one} and {worst_pair.other} first, which pull against each other"
    return "see what is worth a look below" if facts.findings() else "nothing stands out"
