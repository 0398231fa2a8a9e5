"""Building a model of transformers to see what is in it, from a config that anybody may have written: on the meta
device, without network, within bounds."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any

MOST_MODULES = 50_000
"""Of a model that is built to see what is in it: that takes ten seconds"""
_MOST = {re.compile("(layers?|depths?|blocks?|stages?)$"): 2_000, re.compile("labels?$"): 1 << 20}
"""Far more than any model has, by the names of the numbers in its configuration"""
_MOST_OF_ANYTHING = 1 << 27


class TooLargeError(Exception):
    """A model is described that nobody can have."""


def refuse_large_numbers(config: Any) -> None:
    """Configurations and models go through loops as long as their numbers say."""
    waiting = [(config, _MOST_OF_ANYTHING)]
    while waiting:
        value, most = waiting.pop()
        if isinstance(value, Mapping):
            waiting += [(part, _limit(key)) for key, part in value.items()]
        elif isinstance(value, list):
            waiting += [(part, most) for part in value]
        elif isinstance(value, int) and abs(value) > most:
            raise TooLargeError


def _limit(name: str) -> int:
    return next((most for names, most in _MOST.items() if names.search(name)), _MOST_OF_ANYTHING)


@contextmanager
def few_modules() -> Iterator[None]:
    from torch.nn.modules.module import register_module_module_registration_hook as watch

    made = count(1)

    def refuse_many(*_: Any) -> None:
        if next(made) > MOST_MODULES:
            raise TooLargeError

    watching = watch(refuse_many)
    try:
        yield
    finally:
        watching.remove()


@contextmanager
def quiet_and_offline(transformers: Any) -> Iterator[None]:
    from huggingface_hub import constants

    verbosity, offline = transformers.logging.get_verbosity(), constants.HF_HUB_OFFLINE
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    constants.HF_HUB_OFFLINE = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        constants.HF_HUB_OFFLINE = offline
