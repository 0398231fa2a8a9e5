"""The first lines of a report: what was merged, how good it is, and what to do next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mergestream.escaping import shell_command
from mergestream.report.scores import mean
from mergestream.report.tables import format_number, format_range, short_name
from mergestream.sizes import counted

if TYPE_CHECKING:
    from mergestream.report.facts import Facts
    from mergestream.report.scores import Scores

LOST = 0.1
"""A task has a problem when it has lost more than this share of its expert's own score"""
MAX_LEFT_OUT = 3
"""Experts that one is advised to leave out; with more of them, serving all separately is simpler"""


@dataclass(frozen=True)
class NextStep:
    """What to do with the store now."""

    advice: str
    command: str


def verdict(facts: Facts) -> str:
    """What was merged, how good it is as far as is known, and the largest problem."""
    if not facts.history:
        return "This store has no experts yet."
    sentences = [f"{counted(len(facts.history), 'expert')} merged by {facts.manifest.method}."]
    if facts.scores:
        sentences.append(_describe_scores(facts, facts.scores))
    else:
        if last := facts.history[-1].evaluation:
            sentences.append(f"The model scored {last['score']:g} after the last expert.")
        sentences.append(_describe_shares(facts))
    if problem := find_problem(facts):
        sentences.append(problem[1])
    elif not facts.findings():
        sentences.append("There are no findings.")
    return " ".join(sentences)


def next_step(facts: Facts) -> NextStep:
    """Merge, serve the experts one by one, or leave one out."""
    problem = find_problem(facts)
    if not facts.history:
        return _advise("Add the first expert.", "add", facts.store, "EXPERT")
    if problem is None:
        unknown = facts.interference and facts.manifest.adapters and not facts.scores
        advice = "Merge the adapters, and score the model before you use it." if unknown else "Merge the experts."
        return _advise(advice, "export", facts.store, "merged")
    worst, _ = problem
    names = " and ".join(map(short_name, worst))
    if facts.interference and len(worst) <= MAX_LEFT_OUT and 2 * len(worst) <= len(facts.history):
        left_out = ("--without", ",".join(worst))
        advice = f"Leave out {names}, and serve {'them' if len(worst) > 1 else 'it'} separately."
        return _advise(advice, "export", facts.store, "merged", *left_out)
    if facts.interference:
        advice = "Serve the experts one by one as adapters: one model does not serve most of them well."
        return _advise(advice, "export", facts.store, "adapters", "--format", "loras")
    if worst[0] == facts.history[-1].name:
        return _advise(f"Take back {short_name(worst[0])}, the last expert, and serve it alone.", "undo", facts.store)
    advice = f"Merge by a ledger, which can leave out {short_name(worst[0])} later; {facts.manifest.method} cannot."
    return _advise(advice, "init", f"{facts.store}-ledger", "--base", facts.manifest.base.source)


def find_problem(facts: Facts) -> tuple[list[str], str] | None:
    """The experts that the merged model serves badly, the worst first, and a sentence about the worst.

    By the scores if all steps have some, else by the predicted damage, else by opposed task vectors.
    """
    if facts.scores:
        tasks = zip(facts.scores.compared(), facts.history, strict=False)
        found = sorted(((task, entry) for task, entry in tasks if task.lost > LOST), key=lambda pair: -pair[0].lost)
        if found:
            worst = found[0][0]
            sentence = f"{short_name(worst.task)} lost most: {worst.merged:.3g}, its expert has {worst.expert:.3g}."
            return [entry.name for _, entry in found], sentence
        if facts.scores.has_experts and len(facts.scores.matrix) == len(facts.history):
            return None
    if not facts.manifest.adapters and (damaged := facts.damaged()):
        damage, most = damaged[0]
        sentence = f"The model would serve {facts.names[most]} worst (predicted damage {damage:.2f})."
        return [facts.history[i].name for _, i in damaged], sentence
    if facts.conflicts:
        cosine, one, other = facts.conflicts[0]
        pair = f"{facts.names[one]} and {facts.names[other]}"
        return [facts.history[other].name], f"{pair} oppose each other (cosine {format_number(cosine, '.2f')})."
    return None


def _advise(advice: str, *arguments: str) -> NextStep:
    return NextStep(advice, shell_command(["mergestream", *arguments]))


def _describe_scores(facts: Facts, scores: Scores) -> str:
    step = len(scores.matrix)
    model = "The model" if step == len(facts.history) else f"After step {step} the model"
    tasks = scores.compared()
    merged, experts, base = (
        mean(column) for column in zip(*((t.merged, t.expert, t.base) for t in tasks), strict=True)
    )
    if merged is None:
        return f"{model} was not scored on all tasks."
    of_base = "" if base is None else f", base {base:.3g}"
    if experts is None or experts <= 0 or merged < 0:
        return f"{model} has a mean {scores.metric} of {merged:.3g}{of_base}."
    share = f"{model} keeps {merged / experts:.0%} of the experts' own scores"
    return f"{share} (mean {scores.metric} {merged:.3g}, experts {experts:.3g}{of_base})."


def _describe_shares(facts: Facts) -> str:
    share = format_range(facts.survival.total, ".0%")
    if facts.interference is None:
        return f"{share} of each entered the merged state."
    held = f"The ledger holds {share} of each."
    if facts.manifest.adapters:
        return f"{held} Only scores show how good a merge of adapters is."
    known = [value for value in facts.interference.damage if value is not None]
    damage = f" Predicted damage: {format_range(known, '.2f')} (0 is none, 1 is the base)." if known else ""
    return held + damage
