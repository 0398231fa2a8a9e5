"""A recipe for mergekit, read: which base, which models with which weights, by which method, and what we cannot do.

mergekit ignores what it does not know. Here that is refused, for whoever wrote it meant something by it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergestream.checkpoints import FLOATS
from mergestream.checkpoints.location import locate_here
from mergestream.errors import MergestreamError, UsageError, did_you_mean
from mergestream.methods.base import Method
from mergestream.methods.model_stock import ModelStock
from mergestream.methods.weighted import Weighted, as_list

Table = Mapping[str, Any]
_SUMS = ("task_arithmetic", "ties", "dare_linear", "dare_ties")
METHODS = ("linear", *_SUMS, "model_stock")
_DRAWS = ("dare_linear", "dare_ties")
_ELECTS = ("ties", "dare_ties")
_KEYS = (
    *("merge_method", "base_model", "models", "parameters"),
    *("dtype", "out_dtype", "tokenizer_source", "tokenizer"),
)
_BEYOND_US = {
    "slices": "puts layers of models on top of each other (slices); if every layer_range is that of a whole model, "
    "name the models under models instead",
    "modules": "has a recipe for every module (modules); write one for the whole model",
    "chat_template": "sets a chat_template; leave it out, and set it in the tokenizer of the merged model",
    "experts": "builds a mixture of experts (mergekit-moe), which is no merge of weights",
    "genome": "searches for weights (mergekit-evolve); write a recipe with those that were found",
}
_OF_MODELS = {"linear": ("weight",), "model_stock": (), **dict.fromkeys(_SUMS, ("weight", "density"))}
_SHARED = {
    "linear": ("normalize",),
    "model_stock": ("filter_wise",),
    **dict.fromkeys(_SUMS, ("normalize", "rescale", "lambda", "int8_mask")),
}


@dataclass(frozen=True)
class Input:
    """A model that is merged into the base: where it is, its weight and its density."""

    source: str
    weight: float
    density: float


@dataclass(frozen=True)
class Recipe:
    """What a recipe asks for, in our words."""

    merge_method: str
    method: Method
    base: str
    inputs: Sequence[Input]
    dtype: str | None
    notes: Sequence[str]
    """What is otherwise than mergekit has it"""


def read_recipe(path: Path, seed: int = 0) -> Recipe:
    """Read a YAML file; whatever is wrong with it, or beyond us, is told in a sentence that begins with its name."""
    try:
        return _recipe(_parsed(path), seed)
    except UsageError as error:
        raise UsageError(f"{path} {error}") from error


def _parsed(path: Path) -> Table:
    try:
        import yaml
    except ModuleNotFoundError:
        raise MergestreamError("recipes need the package pyyaml: pip install 'mergestream[mergekit]'") from None
    try:
        documents = list(yaml.safe_load_all(path.read_text("utf-8")))
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        raise UsageError(f"is not valid YAML{f' (line {mark.line + 1})' if mark else ''}") from error
    if len(documents) > 1:
        raise UsageError(f"has {len(documents)} recipes (mergekit-multi); give each a file of its own")
    return _table(documents[0] if documents else None, "is no recipe: a table of keys and values is expected")


def _recipe(content: Table, seed: int) -> Recipe:
    for key in content.keys() & _BEYOND_US.keys():
        raise UsageError(_BEYOND_US[key])
    _refuse_unknown(content, _KEYS, "")
    name = _merge_method(content.get("merge_method"))
    shared = _table(content.get("parameters") or {}, "has parameters that are no table")
    _refuse_unknown(shared, (*_SHARED[name], *_OF_MODELS[name]), f" for {name} in its parameters")
    models = _models(content.get("models"), name)
    base = _base(content.get("base_model"), name, list(models))
    _check_tokenizer(content, base)
    inputs = [
        Input(_opened(model, base), _weight(model, own, shared, name), _density(model, own, shared))
        for model, own in models.items()
        if model != base
    ]
    if not inputs:
        raise UsageError("merges nothing into its base; name other models under models")
    is_input = name == "linear" and (base in models or content.get("base_model") is not None)
    of_base = _weight(base, models.get(base, {}), shared, name) if is_input else 0.0
    method = _make_method(name, inputs, shared, of_base, seed)
    dtype = _dtype(content.get("out_dtype") or content.get("dtype"))
    return Recipe(name, method, base, inputs, dtype, _notes(name, inputs, shared))


def _merge_method(name: object) -> str:
    if name is None:
        raise UsageError("has no merge_method")
    if name in ("slerp", "nuslerp", "multislerp"):
        raise UsageError(f"merges by {name}, along an arc, which is not defined for a stream; linear is close to it")
    if name not in METHODS:
        raise UsageError(
            f"merges by {name}{did_you_mean(str(name), METHODS)} (of mergekit's there are: {', '.join(METHODS)})"
        )
    return str(name)


def _models(listed: object, name: str) -> dict[str, Table]:
    """The parameters of every model, by what it is called."""
    if not isinstance(listed, list) or not listed:
        raise UsageError("has no list of models")
    models: dict[str, Table] = {}
    for entry in listed:
        entry = _table(entry, "has an entry of models that is no table")
        _refuse_unknown(entry, ("model", "parameters"), " in an entry of models")
        model = _text(entry.get("model"), "a model")
        if model in models:
            raise UsageError(f"names {model} twice")
        models[model] = _table(entry.get("parameters") or {}, f"has parameters of {model} that are no table")
        _refuse_unknown(models[model], _OF_MODELS[name], f" for {name} in the parameters of {model}")
    return models


def _base(given: object, name: str, models: Sequence[str]) -> str:
    """Without one, the mean of models is the same from wherever it is looked at."""
    if given is not None:
        base = _text(given, "a base_model")
        if len(_parts(base)) > 1:
            raise UsageError(f"has an adapter in its base_model {base}; merge it into the model first")
        return base
    if name != "linear":
        raise UsageError(f"has no base_model, which {name} needs")
    return _parts(models[0])[0]


def _opened(model: str, base: str) -> str:
    """What is to be opened: of MODEL+ADAPTER the adapter, which must be one of the base."""
    whole, *adapter = _parts(model)
    if not adapter:
        return model
    if len(adapter) > 1:
        raise UsageError(f"names {model}, with more than one adapter")
    here = locate_here(whole)
    if whole != base and (here is None or here != locate_here(base)):
        raise UsageError(f"has an adapter of {whole} in {model}, but {base} is the base; merge it into {whole} first")
    return adapter[0]


def _parts(model: str) -> list[str]:
    return [model] if Path(model).exists() else model.split("+")


def _make_method(name: str, inputs: Sequence[Input], shared: Table, of_base: float, seed: int) -> Method:
    """``of_base`` is the weight of the base, which is a model like the others to linear."""
    if name == "model_stock":
        if _truth("filter_wise", shared, False):
            raise UsageError("has filter_wise: true, but model_stock looks at whole tensors here")
        return ModelStock()
    weights = [given.weight for given in inputs]
    normalize = _truth("normalize", shared, name in ("linear", "ties"))
    if name == "linear":
        total = math.fsum((of_base, *weights))
        if normalize and abs(total) < 1e-8:
            raise UsageError("has weights whose sum is 0, which cannot be normalized")
        if not normalize and abs(total - 1) > 1e-6:
            raise UsageError(
                f"has normalize: false and weights whose sum is {total:g}; only 1 keeps the model its size"
            )
        return Weighted(as_list([weight / total for weight in weights]))
    rescale = _truth("rescale", shared, name in _DRAWS)
    if rescale and name == "ties":
        raise UsageError("has rescale: true, but what ties leaves of a task vector is not rescaled here")
    return Weighted(
        as_list(weights),
        as_list([given.density for given in inputs]) if name != "task_arithmetic" else "1",
        "random" if name in _DRAWS else "largest",
        elect=name in _ELECTS,
        normalize=normalize,
        rescale=rescale and name in _DRAWS,
        scale=_number("lambda", shared.get("lambda", 1.0), ""),
        seed=seed if name in _DRAWS else 0,
    )


def _notes(name: str, inputs: Sequence[Input], shared: Table) -> list[str]:
    notes = []
    thinned = any(given.density < 1 for given in inputs)
    if "int8_mask" in shared:
        notes.append("int8_mask makes no difference: no mask is held in memory")
    if name == "task_arithmetic" and thinned:
        notes.append("density makes no difference to task_arithmetic, nor does it in mergekit")
    if name in _DRAWS and thinned:
        notes.append("which entries are dropped is chosen by --seed, and is not what mergekit would have chosen")
    return notes


def _check_tokenizer(content: Table, base: str) -> None:
    source = content.get("tokenizer_source")
    if (settings := content.get("tokenizer")) is not None:
        settings = _table(settings, "has a tokenizer that is no table")
        if others := settings.keys() - {"source"}:
            raise UsageError(f"sets {min(map(str, others))} of the tokenizer; the base's is taken as it is")
        source = settings.get("source", "union")
    if source not in (None, "base", base):
        raise UsageError(f"takes the tokenizer of {source}; here it is the base's: tokenizer_source: base")


def _dtype(given: object) -> str | None:
    if given is None:
        return None
    name = str(given).removeprefix("torch.")
    if name not in FLOATS:
        raise UsageError(f"has the dtype {name}{did_you_mean(name, FLOATS)} (there are: {', '.join(FLOATS)})")
    return name


def _weight(model: str, own: Table, shared: Table, name: str) -> float:
    if name == "model_stock":
        return 1.0
    given = own.get("weight", shared.get("weight"))
    if given is None:
        raise UsageError(f"gives {model} no weight, which {name} needs")
    return _number("weight", given, f" of {model}")


def _density(model: str, own: Table, shared: Table) -> float:
    density = _number("density", own.get("density", shared.get("density", 1.0)), f" of {model}")
    if not 0 < density <= 1:
        raise UsageError(f"has a density of {model}, {density:g}, that is not above 0 and at most 1")
    return density


def _number(key: str, given: object, whose: str) -> float:
    _refuse_many(key, given, whose)
    try:
        number = float(given) if isinstance(given, int | float | str) and not isinstance(given, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"has a {key}{whose}, {given}, that is no number")
    return number


def _truth(key: str, shared: Table, usual: bool) -> bool:
    given = shared.get(key, usual)
    _refuse_many(key, given, "")
    if given not in (True, False):
        raise UsageError(f"has {key}: {given}, which is neither true nor false")
    return bool(given)


def _refuse_many(key: str, given: object, whose: str) -> None:
    if isinstance(given, dict) or (isinstance(given, list) and any(isinstance(value, dict) for value in given)):
        raise UsageError(f"has a {key}{whose} for some tensors only (filter); one number is for all tensors here")
    if isinstance(given, list):
        raise UsageError(f"has a {key}{whose} that changes from layer to layer; one number is for all layers here")


def _refuse_unknown(table: Table, known: Collection[str], where: str) -> None:
    for key in table:
        if key not in known:
            there = f" (there are: {', '.join(known)})" if known else ""
            raise UsageError(f"has an unknown key{where}: {key}{did_you_mean(str(key), known)}{there}")


def _table(value: object, otherwise: str) -> Table:
    if not isinstance(value, dict):
        raise UsageError(otherwise)
    return value


def _text(value: object, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise UsageError(f"has {what}, {value}, that is no path or hub id")
    return value
