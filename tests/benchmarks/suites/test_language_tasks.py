"""The tasks of the language suites: the same every time, nothing in both sets, and every answer right."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

from benchmarks.suites import language_tasks
from benchmarks.suites.language_tasks import TASKS, LanguageTask, first_words, follows, last_words

DRAWN = {task.name: task for task in TASKS if not task.sources}


@pytest.fixture(scope="module")
def splits() -> dict[str, language_tasks.Split]:
    return {name: task.load() for name, task in DRAWN.items()}


def test_there_are_eight_and_each_has_a_key_of_its_own() -> None:
    assert len({task.name for task in TASKS}) == len({task.key for task in TASKS}) == 8
    assert len({task.instruction for task in TASKS}) == 8, "a model must see which task it is"


@pytest.mark.parametrize("name", DRAWN)
def test_what_is_drawn_is_the_same_every_time_and_no_question_comes_twice(
    name: Any, splits: dict[str, language_tasks.Split]
) -> None:
    train, test = splits[name]
    random.seed(1)  # whatever was drawn elsewhere
    assert DRAWN[name].load() == (train, test)
    assert (len(train), len(test)) == (language_tasks.TRAIN, language_tasks.TEST)
    assert len({question for question, _ in train + test}) == len(train) + len(test)
    assert all("\n" not in question + answer for question, answer in train + test)


@pytest.mark.parametrize("name", [task.name for task in TASKS if task.choices and not task.sources])
def test_the_choices_are_the_answers_and_come_about_equally_often(
    name: Any, splits: dict[str, language_tasks.Split]
) -> None:
    answers = [answer for _, answer in splits[name][0]]
    assert set(answers) == set(DRAWN[name].choices)
    assert all(answers.count(choice) > 0.75 * len(answers) / len(DRAWN[name].choices) for choice in set(answers))


def test_sums_and_differences_are_right(splits: dict[str, language_tasks.Split]) -> None:
    for question, answer in splits["arithmetic"][1]:
        a, sign, b = question.split()
        assert int(answer) == int(a) + (int(b) if sign == "+" else -int(b))
        assert 0 <= int(answer) < 199


def test_sorted_words_are_those_of_the_question(splits: dict[str, language_tasks.Split]) -> None:
    for question, answer in splits["sort"][1]:
        assert answer.split() == sorted(question.split()) and len(set(answer.split())) == 4


def test_a_code_is_translated_word_by_word_and_can_be_turned_back(splits: dict[str, language_tasks.Split]) -> None:
    assert len(set(language_tasks.ZARN.values())) == len(set(language_tasks.LUMO)) == 20
    back = {theirs: ours for ours, theirs in language_tasks.ZARN.items()}
    for question, answer in splits["code"][1]:
        assert " ".join(back[word] for word in answer.split()) == question


def test_the_facts_are_in_the_sentence(splits: dict[str, language_tasks.Split]) -> None:
    for question, answer in splits["json"][1]:
        facts = json.loads(answer)
        assert list(facts) == ["name", "age", "city"]
        assert all(re.search(rf"\b{value}\b", question) for value in facts.values())


def test_a_query_asks_for_what_the_request_names(splits: dict[str, language_tasks.Split]) -> None:
    form = re.compile(r"SELECT (\w+) FROM (\w+) WHERE (\w+) ([<>]) (\d+)( ORDER BY (\w+))?;")
    for question, answer in splits["sql"][1]:
        found = form.fullmatch(answer)
        assert found is not None
        shown, table, tested, sign, number, _, order = found.groups()
        assert re.search(rf"\b{tested} (is )?{'above' if sign == '>' else 'below'} {number}\b", question)
        assert re.search(rf"\b{shown}\b", question) and re.search(rf"\b{table}\b", question)
        assert ("sorted by" in question) == bool(order) and (not order or question[:-1].endswith(f"sorted by {order}"))


def test_what_follows_from_what() -> None:
    assert follows("running", "running") == follows("running", "moving") == follows("moving", "moving") == "yes"
    assert follows("running", "walking") == follows("running", "sleeping") == follows("moving", "resting") == "no"
    assert follows("moving", "running") == follows("in the park", "hungry") == "maybe"
    assert follows("in the hall", "outdoors") == "no" and follows("indoors", "in the hall") == "maybe"


def test_inferences_are_about_what_was_said(splits: dict[str, language_tasks.Split]) -> None:
    actions = [word for kind in language_tasks.ACTIONS for word in (kind, *language_tasks.KINDS[kind])]
    places = [word for kind in language_tasks.PLACES for word in (kind, *language_tasks.KINDS[kind])]
    sentence = re.compile(
        rf"The \w+ (\w+) is ({'|'.join(actions)}) ({'|'.join(places)})\. The \1 is ([\w ]+)\."  # all parts are found
    )
    for question, answer in splits["nli"][1]:
        found = sentence.fullmatch(question)
        assert found is not None, question
        _, action, place, claimed = found.groups()
        assert follows(place if claimed in places else action, claimed) == answer


def test_texts_are_cut_at_words_in_one_line() -> None:
    text = "  The  quick\nbrown fox " * 20
    for cut in (first_words(text), last_words(text)):
        assert 100 < len(cut) <= language_tasks.CHARACTERS
        assert set(cut.split(" ")) == {"The", "quick", "brown", "fox"}
    assert first_words("short  one") == last_words("short  one") == "short one"


def test_real_texts_are_on_one_side_only_even_when_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language_tasks, "TRAIN", 3)
    rows = [(str(number), f"text {number % 5} and more", "science") for number in range(8)]
    train, test = language_tasks.drawn(rows[:4], rows[2:], first_words)
    assert len(train) == 3 and test == [("text 4 and more", "science")]


def test_topics_and_sentiments_are_read_from_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = ("rec.autos", "sci.med", "misc.forsale")
    rows = [(str(number), f"about {group} {number}", group) for number, group in enumerate(groups * 2)]
    monkeypatch.setattr(language_tasks, "newsgroups", lambda name: (rows[:3], rows[3:]))
    train, test = language_tasks.topics()
    assert sorted(train) == [("about rec.autos 0", "vehicles"), ("about sci.med 1", "science")] and len(test) == 2
    reviews = [(str(n), f"the film was number {n}", language_tasks.SENTIMENTS[n % 2]) for n in range(10)]
    monkeypatch.setattr(language_tasks, "imdb", lambda: reviews)
    train, test = language_tasks.sentiments()
    assert (len(train), len(test)) == (7, 3) and set(train + test) == {(text, label) for _, text, label in reviews}


def test_one_template_for_all() -> None:
    task = LanguageTask("add", "Calculate.", lambda: ([], []))
    assert task.prompt("1 + 1") == "Calculate.\n1 + 1\nAnswer:"
