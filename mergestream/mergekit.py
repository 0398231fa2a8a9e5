"""Read mergekit recipes: base, models, weights and method.

mergekit ignores keys that it does not know. This module refuses them, and every setting that it cannot reproduce.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergestream import Method, ModelStock, Weighted
from mergestream.errors import MergestreamError, UsageError, did_you_mean

Table = Mapping[str, Any]
_SUMS = ("task_arithmetic", "ties", "dare_linear", "dare_ties")
METHODS = ("linear", *_SUMS, "model_stock")
_DROPS_AT_RANDOM = ("dare_linear", "dare_ties")
_ELECTS_SIGNS = ("ties", "dare_ties")
_DTYPES = ("bfloat16", "float16", "float32", "float64")
_KEYS = ["merge_method", "base_model", "models", "parameters", "dtype", "out_dtype", "tokenizer_source", "tokenizer"]
_UNSUPPORTED_KEYS = {
    "slices": "stacks layers of models (slices); if every layer_range covers a whole model, list the models under "
    "models instead",
    "modules": "has a recipe for every module (modules); write one for the whole model",
    "chat_template": "sets a chat_template; remove it, and set it in the tokenizer of the merged model",
    "experts": "builds a mixture of experts (mergekit-moe), which does not merge weights",
    "genome": "searches for weights (mergekit-evolve); write a recipe with the weights it found",
}
_MODEL_PARAMETERS = {"linear": ("weight",), "model_stock": (), **dict.fromkeys(_SUMS, ("weight", "density"))}
_SHARED_PARAMETERS = {
    "linear": ("normalize",),
    "model_stock": ("filter_wise",),
    **dict.fromkeys(_SUMS, ("normalize", "rescale", "lambda", "int8_mask")),
}


@dataclass(frozen=True)
class Input:
    """A model that is merged into the base."""

    source: str
    weight: float
    density: float


@dataclass(frozen=True)
class Recipe:
    """A mergekit recipe as a base, experts and a method of this package."""

    merge_method: str
    method: Method
    base: str
    inputs: Sequence[Input]
    dtype: str | None
    notes: Sequence[str]
    """Where the result differs from mergekit's"""


def read_recipe(path: Path, seed: int = 0) -> Recipe:
    """Read a YAML recipe; every error names the file."""
    try:
        return _recipe(_parse(path), seed)
    except UsageError as error:
        raise UsageError(f"{path} {error}") from error


def _parse(path: Path) -> Table:
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
        raise UsageError(f"has {len(documents)} recipes (mergekit-multi); write each to its own file")
    return _table(documents[0] if documents else None, "is not a recipe: it must be a table of keys and values")


def _recipe(content: Table, seed: int) -> Recipe:
    for key in content.keys() & _UNSUPPORTED_KEYS.keys():
        raise UsageError(_UNSUPPORTED_KEYS[key])
    _refuse_unknown(content, _KEYS, "")
    name = _merge_method(content.get("merge_method"))
    shared = _table(content.get("parameters") or {}, "has parameters that are not a table")
    _refuse_unknown(shared, (*_SHARED_PARAMETERS[name], *_MODEL_PARAMETERS[name]), f" for {name} in its parameters")
    models = _models(content.get("models"), name)
    base = _base(content.get("base_model"), name, list(models))
    _check_tokenizer(content, base)
    inputs = [
        Input(_source(model, base), _weight(model, own, shared, name), _density(model, own, shared))
        for model, own in models.items()
        if model != base
    ]
    if not inputs:
        raise UsageError("merges nothing into its base; list other models under models")
    is_input = name == "linear" and (base in models or content.get("base_model") is not None)
    base_weight = _weight(base, models.get(base, {}), shared, name) if is_input else 0.0
    method = _make_method(name, inputs, shared, base_weight, seed)
    dtype = _dtype(content.get("out_dtype") or content.get("dtype"))
    return Recipe(name, method, base, inputs, dtype, _notes(name, inputs, shared))


def _merge_method(name: object) -> str:
    if name is None:
        raise UsageError("has no merge_method")
    if name in ("slerp", "nuslerp", "multislerp"):
        raise UsageError(f"merges by {name}, which is not defined for a stream of models; linear is close to it")
    if name not in METHODS:
        raise UsageError(f"merges by {name}{did_you_mean(str(name), METHODS)} (supported: {', '.join(METHODS)})")
    return str(name)


def _models(listed: object, name: str) -> dict[str, Table]:
    """The parameters of every model, by its path or hub id."""
    if not isinstance(listed, list) or not listed:
        raise UsageError("has no list of models")
    models: dict[str, Table] = {}
    for entry in listed:
        entry = _table(entry, "has an entry of models that is not a table")
        _refuse_unknown(entry, ("model", "parameters"), " in an entry of models")
        model = _text(entry.get("model"), "model")
        if model in models:
            raise UsageError(f"lists {model} twice")
        models[model] = _table(entry.get("parameters") or {}, f"has parameters of {model} that are not a table")
        _refuse_unknown(models[model], _MODEL_PARAMETERS[name], f" for {name} in the parameters of {model}")
    return models


def _base(given: object, name: str, models: Sequence[str]) -> str:
    """The base_model; linear may take any model instead, because a mean is the same from every starting point."""
    if given is not None:
        base = _text(given, "base_model")
        if len(_split_adapter(base)) > 1:
            raise UsageError(f"has an adapter in its base_model {base}; merge it into the model first")
        return base
    if name != "linear":
        raise UsageError(f"has no base_model, which {name} needs")
    return _split_adapter(models[0])[0]


def _source(model: str, base: str) -> str:
    """The model, or the adapter of MODEL+ADAPTER, whose MODEL must be the base."""
    whole, *adapter = _split_adapter(model)
    if not adapter:
        return model
    if len(adapter) > 1:
        raise UsageError(f"lists {model}, with more than one adapter")
    if whole != base and not (Path(whole).exists() and Path(whole).resolve() == Path(base).resolve()):
        raise UsageError(f"has an adapter of {whole} in {model}, but the base is {base}; merge it into {whole} first")
    return adapter[0]


def _split_adapter(model: str) -> list[str]:
    return [model] if Path(model).exists() else model.split("+")


def _make_method(name: str, inputs: Sequence[Input], shared: Table, base_weight: float, seed: int) -> Method:
    """The method; linear treats the base as one more model, with ``base_weight``."""
    if name == "model_stock":
        if _flag("filter_wise", shared, False):
            raise UsageError("has filter_wise: true, but model_stock works on whole tensors here")
        return ModelStock()
    weights = [given.weight for given in inputs]
    normalize = _flag("normalize", shared, name in ("linear", "ties"))
    if name == "linear":
        total = math.fsum((base_weight, *weights))
        if normalize and abs(total) < 1e-8:
            raise UsageError("has weights whose sum is 0, which cannot be normalized")
        if not normalize and abs(total - 1) > 1e-6:
            raise UsageError(f"has normalize: false and weights whose sum is {total:g}; the sum must be 1")
        return Weighted(_comma_separated([weight / total for weight in weights]))
    is_random = name in _DROPS_AT_RANDOM
    rescale = _flag("rescale", shared, is_random)
    if rescale and name == "ties":
        raise UsageError("has rescale: true, but ties does not rescale a trimmed task vector here")
    return Weighted(
        _comma_separated(weights),
        _comma_separated([given.density for given in inputs]) if name != "task_arithmetic" else "1",
        "random" if is_random else "largest",
        elect=name in _ELECTS_SIGNS,
        normalize=normalize,
        rescale=rescale and is_random,
        scale=_number("lambda", shared.get("lambda", 1.0), ""),
        seed=seed if is_random else 0,
    )


def _comma_separated(numbers: Sequence[float]) -> str:
    """Numbers as `Weighted` parses them, without rounding."""
    return ",".join(map(repr, numbers))


def _notes(name: str, inputs: Sequence[Input], shared: Table) -> list[str]:
    notes = []
    is_sparse = any(given.density < 1 for given in inputs)
    if "int8_mask" in shared:
        notes.append("int8_mask has no effect: no mask is kept in memory")
    if name == "task_arithmetic" and is_sparse:
        notes.append("density has no effect on task_arithmetic, as in mergekit")
    if name in _DROPS_AT_RANDOM and is_sparse:
        notes.append("--seed chooses which elements are dropped, and mergekit would choose others")
    return notes


def _check_tokenizer(content: Table, base: str) -> None:
    source = content.get("tokenizer_source")
    if (settings := content.get("tokenizer")) is not None:
        settings = _table(settings, "has a tokenizer that is not a table")
        if others := settings.keys() - {"source"}:
            raise UsageError(f"sets {min(map(str, others))} of the tokenizer; only the base's tokenizer is supported")
        source = settings.get("source", "union")
    if source not in (None, "base", base):
        raise UsageError(f"takes the tokenizer of {source}; only the base's is supported: tokenizer_source: base")


def _dtype(given: object) -> str | None:
    if given is None:
        return None
    name = str(given).removeprefix("torch.")
    if name not in _DTYPES:
        raise UsageError(f"has the dtype {name}{did_you_mean(name, _DTYPES)} (supported: {', '.join(_DTYPES)})")
    return name


def _weight(model: str, own: Table, shared: Table, name: str) -> float:
    if name == "model_stock":
        return 1.0
    given = own.get("weight", shared.get("weight"))
    if given is None:
        raise UsageError(f"has no weight for {model}, which {name} needs")
    return _number("weight", given, f" of {model}")


def _density(model: str, own: Table, shared: Table) -> float:
    density = _number("density", own.get("density", shared.get("density", 1.0)), f" of {model}")
    if not 0 < density <= 1:
        raise UsageError(f"has a density of {model}, {density:g}, that is not in (0, 1]")
    return density


def _number(key: str, given: object, owner: str) -> float:
    _refuse_list(key, given, owner)
    try:
        number = float(given) if isinstance(given, int | float | str) and not isinstance(given, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"has a {key}{owner}, {given}, that is not a number")
    return number


def _flag(key: str, shared: Table, default: bool) -> bool:
    given = shared.get(key, default)
    _refuse_list(key, given, "")
    if given not in (True, False):
        raise UsageError(f"has {key}: {given}, which is neither true nor false")
    return bool(given)


def _refuse_list(key: str, given: object, owner: str) -> None:
    if isinstance(given, dict) or (isinstance(given, list) and any(isinstance(value, dict) for value in given)):
        raise UsageError(f"has a {key}{owner} for some tensors only (filter); give one number for all tensors")
    if isinstance(given, list):
        raise UsageError(f"has a {key}{owner} that changes from layer to layer; give one number for all layers")


def _refuse_unknown(table: Table, known: Collection[str], where: str) -> None:
    for key in table:
        if key not in known:
            choices = f" (known: {', '.join(known)})" if known else ""
            raise UsageError(f"has an unknown key{where}: {key}{did_you_mean(str(key), known)}{choices}")


def _table(value: object, error: str) -> Table:
    if not isinstance(value, dict):
        raise UsageError(error)
    return value


def _text(value: object, key: str) -> str:
    if not isinstance(value, str) or not value:
        raise UsageError(f"has a {key}, {value}, that is not a path or hub id")
    return value
