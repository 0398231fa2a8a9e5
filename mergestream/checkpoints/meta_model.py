"""Build a transformers model on the meta device from an untrusted config: no weights, no network, bounded size."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any

MAX_MODULES = 50_000
"""Modules that a model may have; building so many takes ten seconds"""
_MAX_BY_NAME = {re.compile("(layers?|depths?|blocks?|stages?)$"): 2_000, re.compile("labels?$"): 1 << 20}
"""Largest values of config fields by the end of their name, far above those of any real model"""
_MAX_NUMBER = 1 << 27


class TooLargeError(Exception):
    """The config describes a model that is too large to exist."""


def check_config_numbers(config: Any) -> None:
    """Refuse large numbers in a config: transformers loops as often as they say."""
    stack = [(config, _MAX_NUMBER)]
    while stack:
        value, limit = stack.pop()
        if isinstance(value, Mapping):
            for key, part in value.items():
                limits = (limit for pattern, limit in _MAX_BY_NAME.items() if pattern.search(key))
                stack.append((part, next(limits, _MAX_NUMBER)))
        elif isinstance(value, list):
            stack += [(part, limit) for part in value]
        elif isinstance(value, int) and abs(value) > limit:
            raise TooLargeError


def build_on_meta(make_model: Callable[[Any], Any], config: Any) -> Any:
    """Build a model on the meta device and tie its weights; stop if it gets more than ``MAX_MODULES`` modules."""
    import torch
    from torch.nn.modules.module import register_module_module_registration_hook

    modules = count(1)

    def refuse_many(*_: Any) -> None:
        if next(modules) > MAX_MODULES:
            raise TooLargeError

    hook = register_module_module_registration_hook(refuse_many)
    try:
        with torch.device("meta"):
            model = make_model(config)
            model.tie_weights()
    finally:
        hook.remove()
    return model


@contextmanager
def quiet_and_offline(transformers: Any) -> Iterator[None]:
    """Keep transformers from logging, warning, showing progress bars and using the network."""
    from huggingface_hub import constants

    logging = transformers.logging
    verbosity, has_bars, offline = logging.get_verbosity(), logging.is_progress_bar_enabled(), constants.HF_HUB_OFFLINE
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    constants.HF_HUB_OFFLINE = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()
        constants.HF_HUB_OFFLINE = offline
