"""The tasks of the ``language`` suites: one-line questions with one right answer.

Two tasks have real texts from packages, six are random. No question is in both the training and the test set.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from benchmarks.suites.cache import key_of
from benchmarks.suites.text import IMDB, ORANGE, Row, imdb, newsgroups, split

Example = tuple[str, str]  # question, answer
Split = tuple[list[Example], list[Example]]  # train, test
TRAIN, TEST = 4000, 1000
CHARACTERS = 120  # of a text: about 30 tokens


@dataclass(frozen=True)
class LanguageTask:
    """A task's prompt and answers; without ``choices`` the model writes a free answer."""

    name: str
    instruction: str
    load: Callable[[], Split]
    choices: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()  # digests of the source packages
    version: int = 1  # version of the loader, part of every cache key

    @property
    def key(self) -> str:
        return key_of(self.name, self.instruction, self.choices, self.sources, self.version)

    def prompt(self, question: str) -> str:
        """Return the prompt; a space and the answer follow."""
        return f"{self.instruction}\n{question}\nAnswer:"


# --- texts -------------------------------------------------------------------------------------------------

TOPICS = {
    "computers": ("comp.graphics", "comp.os.ms-windows.misc", "comp.sys.ibm.pc.hardware", "comp.sys.mac.hardware"),
    "vehicles": ("rec.autos", "rec.motorcycles"),
    "sports": ("rec.sport.baseball", "rec.sport.hockey"),
    "science": ("sci.crypt", "sci.electronics", "sci.med", "sci.space"),
    "politics": ("talk.politics.guns", "talk.politics.mideast", "talk.politics.misc"),
    "religion": ("alt.atheism", "soc.religion.christian", "talk.religion.misc"),
}
SENTIMENTS = ("positive", "negative")


def first_words(text: str) -> str:
    """Return the beginning of a text in one line, cut at a word."""
    line = " ".join(text.split())
    return line if len(line) <= CHARACTERS else line[:CHARACTERS].rpartition(" ")[0]


def last_words(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= CHARACTERS else line[-CHARACTERS:].partition(" ")[2]


def drawn(train: Iterable[Row], test: Iterable[Row], cut: Callable[[str], str]) -> Split:
    """Draw the wanted number of rows at random; texts that are equal after cutting are on one side of the split."""
    questions: dict[str, str] = {}
    sides = []
    for rows, count in ((train, TRAIN), (test, TEST)):
        unseen = {cut(text): label for _, text, label in rows if cut(text) and cut(text) not in questions}
        questions |= unseen
        sides.append(random.Random(0).sample(list(unseen.items()), min(count, len(unseen))))
    return sides[0], sides[1]


def topics() -> Split:
    topic_of = {group: topic for topic, groups in TOPICS.items() for group in groups}
    train, test = (
        [(number, text, topic_of[group]) for number, text, group in rows if group in topic_of]
        for rows in newsgroups("20newsgroups")
    )
    return drawn(train, test, first_words)


def sentiments() -> Split:
    return drawn(*split(imdb(), SENTIMENTS), last_words)  # a review's verdict is at its end


# --- drawn at random ---------------------------------------------------------------------------------------


def generated(draw: Callable[[random.Random], Example]) -> Split:
    """Yield different questions."""
    chance, answers = random.Random(0), dict[str, str]()
    while len(answers) < TRAIN + TEST:
        question, answer = draw(chance)
        answers.setdefault(question, answer)
    examples = list(answers.items())
    return examples[:TRAIN], examples[TRAIN:]


ADJECTIVES = ("young", "tall", "tired", "quiet", "famous", "little")
MOODS = ("hungry", "happy", "bored", "lost", "late", "angry")
KINDS = {  # of what somebody does, and of where
    "moving": ("running", "walking", "swimming", "dancing"),
    "resting": ("sleeping", "sitting", "lying down", "napping"),
    "making a sound": ("singing", "shouting", "whistling", "laughing"),
    "outdoors": ("in the park", "on the beach", "in the forest", "in the field"),
    "indoors": ("in the kitchen", "in the hall", "in the cellar", "in the attic"),
}
ACTIONS, PLACES = ("moving", "resting", "making a sound"), ("outdoors", "indoors")
SOMEBODY = ("boy", "girl", "cook", "nurse", "farmer", "dog", "cat", "horse")
INFERENCES = ("yes", "no", "maybe")


def word_of(kind: str, chance: random.Random) -> str:
    """Return the kind or an example of it."""
    return chance.choice((kind, chance.choice(KINDS[kind])))


def follows(said: str, claimed: str) -> str:
    """Make a premise, a hypothesis and whether it follows."""
    if claimed in MOODS:
        return "maybe"
    if claimed == said or said in KINDS.get(claimed, ()):
        return "yes"
    return "maybe" if claimed in KINDS.get(said, ()) else "no"


def inference(chance: random.Random) -> Example:
    somebody, wanted = chance.choice(SOMEBODY), chance.choice(INFERENCES)
    action, place = (word_of(chance.choice(kinds), chance) for kinds in (ACTIONS, PLACES))
    while True:  # the three answers are equally frequent
        kinds, said = chance.choice(((ACTIONS, action), (PLACES, place)))
        claimed = chance.choice(MOODS) if chance.random() < 0.1 else word_of(chance.choice(kinds), chance)
        if follows(said, claimed) == wanted:
            break
    premise = f"The {chance.choice(ADJECTIVES)} {somebody} is {action} {place}."
    return f"{premise} The {somebody} is {claimed}.", wanted


NAMES = ("Ann", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Irene", "Jack", "Kate", "Leo", "Maria",
         "Nina", "Oscar", "Paul", "Rosa", "Sam", "Tom", "Vera")  # fmt: skip
CITIES = ("Berlin", "Boston", "Cairo", "Dublin", "Geneva", "Lima", "London", "Madrid", "Moscow", "Oslo", "Paris",
          "Prague", "Rome", "Sydney", "Tokyo", "Vienna")  # fmt: skip
FACTS = (
    "{name} is {age} years old and lives in {city}.",
    "In {city} lives {name}, aged {age}.",
    "At the age of {age}, {name} moved to {city}.",
    "{city} is the home of {age}-year-old {name}.",
    "Meet {name} from {city}, who is {age}.",
)


def extraction(chance: random.Random) -> Example:
    facts = {"name": chance.choice(NAMES), "age": chance.randint(18, 90), "city": chance.choice(CITIES)}
    return chance.choice(FACTS).format(**facts), json.dumps(facts)


def calculation(chance: random.Random) -> Example:
    a, b = chance.randint(0, 99), chance.randint(0, 99)
    if chance.random() < 0.5:
        return f"{a} + {b}", str(a + b)
    return f"{max(a, b)} - {min(a, b)}", str(abs(a - b))


WORDS = ("apple", "bread", "chair", "door", "egg", "fish", "glass", "house", "ice", "juice", "king", "lamp", "moon",
         "night", "ocean", "paper", "queen", "river", "stone", "table", "uncle", "voice", "water", "yard")  # fmt: skip


def sorting(chance: random.Random) -> Example:
    words = chance.sample(WORDS, 4)
    return " ".join(words), " ".join(sorted(words))


SOUNDS = [consonant + vowel for consonant in "bdfgklmnprst" for vowel in "aeiou"]
_codes = random.Random(1)
LUMO = [f"{_codes.choice(SOUNDS)}{letter}" for letter in string.ascii_lowercase[:20]]
ZARN = dict(zip(LUMO, _codes.sample([a + b for a in SOUNDS for b in SOUNDS], len(LUMO)), strict=True))


def translation(chance: random.Random) -> Example:
    words = [chance.choice(LUMO) for _ in range(3)]
    return " ".join(words), " ".join(ZARN[word] for word in words)


TABLES = {
    "users": ("name", "age", "city"),
    "books": ("title", "year", "price"),
    "songs": ("title", "length", "artist"),
    "cars": ("brand", "speed", "price"),
    "films": ("title", "year", "director"),
}
NUMBERS = ("age", "year", "price", "length", "speed")
REQUESTS = (
    "Show the {shown} of {table} with {tested} {word} {number}{sorted}.",
    "Find {table} whose {tested} is {word} {number} and list their {shown}{sorted}.",
    "What is the {shown} of all {table} with a {tested} {word} {number}{sorted}?",
)


def query(chance: random.Random) -> Example:
    table = chance.choice(list(TABLES))
    columns = TABLES[table]
    shown, order = chance.choice(columns), chance.choice((None, *columns))
    tested = chance.choice([column for column in columns if column in NUMBERS])
    word, sign = chance.choice((("above", ">"), ("below", "<")))
    number = chance.randint(1, 99)
    question = chance.choice(REQUESTS).format(
        shown=shown,
        table=table,
        tested=tested,
        word=word,
        number=number,
        sorted=f", sorted by {order}" if order else "",
    )
    ordered = f" ORDER BY {order}" if order else ""
    return question, f"SELECT {shown} FROM {table} WHERE {tested} {sign} {number}{ordered};"


TASKS = (
    LanguageTask("topic", "Name the topic of the text.", topics, tuple(TOPICS), (ORANGE.sha256,)),
    LanguageTask("json", "Write the facts as JSON.", partial(generated, extraction)),
    LanguageTask("arithmetic", "Calculate.", partial(generated, calculation)),
    LanguageTask("sentiment", "Is the review positive or negative?", sentiments, SENTIMENTS, (IMDB.sha256,)),
    LanguageTask("code", "Translate from Lumo to Zarn.", partial(generated, translation)),
    LanguageTask("sort", "Sort the words alphabetically.", partial(generated, sorting)),
    LanguageTask("nli", "Is the second sentence true?", partial(generated, inference), INFERENCES),
    LanguageTask("sql", "Write the SQL query.", partial(generated, query)),
)
