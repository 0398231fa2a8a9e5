"""Read mergekit recipes: base, models, weights and method.

mergekit ignores keys that it does not know. This module refuses them, and every setting that it cannot reproduce.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergestream import SLERP, Method, ModelStock, Weighted
from mergestream.commands import NUMBER
from mergestream.errors import MergestreamError, UsageError, did_you_mean
from mergestream.escaping import one_line

Table = Mapping[str, Any]
_SUMS = ("task_arithmetic", "ties", "dare_linear", "dare_ties")
METHODS = ("linear", *_SUMS, "model_stock", "slerp")
_DROPS_AT_RANDOM = ("dare_linear", "dare_ties")
_ELECTS_SIGNS = ("ties", "dare_ties")
_DTYPES = ("bfloat16", "float16", "float32", "float64")
_MAX_BYTES, _MAX_ALIASES, _MAX_DEPTH, _MAX_TEXT = 1 << 17, 16, 16, 1000
"""Bounds of a recipe, so that none takes long to read; the last one is the length of one value"""
_NUMBER = re.compile(NUMBER, re.ASCII)
_KEYS = [
    "merge_method",
    "base_model",
    "models",
    "slices",
    "parameters",
    "dtype",
    "out_dtype",
    "tokenizer_source",
    "tokenizer",
]
_UNSUPPORTED_KEYS = {
    "modules": "has a recipe for every module (modules); write one for the whole model",
    "chat_template": "sets a chat_template; remove it, and set it in the tokenizer of the merged model",
    "experts": "builds a mixture of experts (mergekit-moe), which does not merge weights",
    "genome": "searches for weights (mergekit-evolve); write a recipe with the weights it found",
}
STACKS = "layers of models can be stacked by mergekit only; here, slices must cover all layers of the same models"
_MODEL_PARAMETERS = {
    "linear": ("weight",),
    "model_stock": (),
    "slerp": (),
    **dict.fromkeys(_SUMS, ("weight", "density")),
}
_SHARED_PARAMETERS = {
    "linear": ("normalize",),
    "model_stock": ("filter_wise",),
    "slerp": ("t",),
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
    layers: int | None = None
    """How many layers its slices cover; None for a recipe without slices"""


def read_recipe(path: Path, seed: int = 0) -> Recipe:
    """Read a YAML recipe; every error names the file."""
    try:
        return _recipe(_parse(path), seed)
    except UsageError as error:
        raise UsageError(f"{path} {error}") from error
    except RecursionError as error:
        raise UsageError(f"{path} contains itself by an alias") from error


def _parse(path: Path) -> Table:
    try:
        import yaml
    except ModuleNotFoundError:
        raise MergestreamError("recipes need the package pyyaml: pip install 'mergestream[mergekit]'") from None

    loader: Any = type("Loader", (yaml.SafeLoader,), {})
    for kind in ("int", "float", "timestamp"):  # stay text: YAML takes 12:30:45 and 1_0 for numbers
        loader.add_constructor(f"tag:yaml.org,2002:{kind}", yaml.SafeLoader.construct_scalar)
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise UsageError(f"is no recipe: it is longer than {_MAX_BYTES} bytes")
        aliases = depth = 0
        for event in yaml.parse(content.decode(), Loader=loader):
            aliases += isinstance(event, yaml.AliasEvent)
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            is_long = isinstance(event, yaml.ScalarEvent) and len(event.value) > _MAX_TEXT
            if aliases > _MAX_ALIASES or depth > _MAX_DEPTH or is_long:
                what = f"a value of more than {_MAX_TEXT} characters" if is_long else "too many aliases or levels"
                raise UsageError(f"has {what} (line {event.start_mark.line + 1})")
        documents = list(yaml.load_all(content.decode(), Loader=loader))
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
    listed, layers = _unsliced(content)
    models = _models(listed, name)
    base = _base(content.get("base_model"), name, list(models))
    _check_tokenizer(content, base)
    own_of_base = models.pop(base, None)
    if not models:
        raise UsageError("merges nothing into its base; list other models under models")
    if name == "slerp" or (name == "linear" and (own_of_base is not None or content.get("base_model") is not None)):
        models = {base: own_of_base or {}, **models}
    inputs = [
        Input(_source(model, base), _weight(model, own, shared, name), _density(model, own, shared))
        for model, own in models.items()
    ]
    method = _make_method(name, inputs, shared, seed)
    dtype = _dtype(content.get("out_dtype") or content.get("dtype"))
    return Recipe(name, method, base, inputs, dtype, _notes(name, inputs, shared), layers)


def _merge_method(name: object) -> str:
    if name is None:
        raise UsageError("has no merge_method")
    name = _text(name, "merge_method", "text")
    if name not in METHODS:
        raise UsageError(f"merges by {name}{did_you_mean(name, METHODS)} (supported: {', '.join(METHODS)})")
    return name


def _unsliced(content: Table) -> tuple[object, int | None]:
    """The list of models; where it is given as slices of the same models, also how many layers they cover."""
    slices = content.get("slices")
    if slices is None:
        return content.get("models"), None
    listed, covered = content.get("models"), 0
    for part in _tables(slices, "slices"):
        _refuse_unknown(part, ("sources",), " in an entry of slices")
        sources = [dict(source) for source in _tables(part.get("sources"), "sources")]
        ranges = [source.pop("layer_range", None) for source in sources]
        end = ranges[0][-1] if isinstance(ranges[0], list) and ranges[0] else None
        if listed not in (None, sources) or any(found != [str(covered), end] for found in ranges):
            raise UsageError(f"has slices that stack layers: {STACKS}")
        listed, covered = sources, round(_number("layer_range", end, ""))
    return listed, covered


def _tables(given: object, key: str) -> list[Table]:
    if not isinstance(given, list) or not given:
        raise UsageError(f"has no list of {key}")
    return [_table(entry, f"has an entry of {key} that is not a table") for entry in given]


def _models(listed: object, name: str) -> dict[str, Table]:
    """The parameters of every model, by its path or hub id."""
    models: dict[str, Table] = {}
    for entry in _tables(listed, "models"):
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


def _make_method(name: str, inputs: Sequence[Input], shared: Table, seed: int) -> Method:
    if name == "slerp":
        if len(inputs) != 2:
            raise UsageError(f"merges {len(inputs)} models by slerp, which is for two: the base_model and another one")
        return SLERP(_number("t", shared.get("t"), "") if "t" in shared else 0.5)
    if name == "model_stock":
        if _flag("filter_wise", shared, False):
            raise UsageError("has filter_wise: true, but model_stock works on whole tensors here")
        return ModelStock()
    weights = [given.weight for given in inputs]
    normalize = _flag("normalize", shared, name in ("linear", "ties"))
    if name == "linear":
        total = math.fsum(weights)
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
        scale=_number("lambda", shared.get("lambda", "1"), ""),
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
    if source is not None and _text(source, "tokenizer_source", "text") not in ("base", base):
        raise UsageError(f"takes the tokenizer of {source}; only the base's is supported: tokenizer_source: base")


def _dtype(given: object) -> str | None:
    if given is None:
        return None
    name = _text(given, "dtype", "text").removeprefix("torch.")
    if name not in _DTYPES:
        raise UsageError(f"has the dtype {name}{did_you_mean(name, _DTYPES)} (supported: {', '.join(_DTYPES)})")
    return name


def _weight(model: str, own: Table, shared: Table, name: str) -> float:
    if name in ("model_stock", "slerp"):
        return 1.0
    given = own.get("weight", shared.get("weight"))
    if given is None:
        raise UsageError(f"has no weight for {model}, which {name} needs")
    return _number("weight", given, f" of {model}")


def _density(model: str, own: Table, shared: Table) -> float:
    density = _number("density", own.get("density", shared.get("density", "1")), f" of {model}")
    if not 0 < density <= 1:
        raise UsageError(f"has a density of {model}, {density:g}, that is not in (0, 1]")
    return density


def _number(key: str, given: object, owner: str) -> float:
    _refuse_list(key, given, owner)
    is_number = isinstance(given, str) and _NUMBER.fullmatch(given)
    number = float(given) if isinstance(given, str) and is_number else math.nan
    if not math.isfinite(number):
        raise UsageError(f"has a {key}{owner}, {_shown(given)}, that is not a number")
    return number


def _flag(key: str, shared: Table, default: bool) -> bool:
    given = shared.get(key, default)
    _refuse_list(key, given, "")
    if given not in (True, False):
        raise UsageError(f"has {key}: {_shown(given)}, which is neither true nor false")
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


def _text(value: object, key: str, kind: str = "a path or hub id") -> str:
    if not isinstance(value, str) or not value:
        raise UsageError(f"has a {key}, {_shown(value)}, that is not {kind}")
    return value


def _shown(value: object) -> str:
    """A value in a message, cut; of a collection only the kind, because aliases can make it very long."""
    return f"a {type(value).__name__}" if isinstance(value, dict | list) else one_line(str(value), 100)
