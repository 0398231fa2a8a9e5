"""From the names that PEFT gives to modules to those of the base's tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from mergestream.errors import MergestreamError


def translator(names: Iterable[str], spellings: Mapping[str, str]) -> Callable[[str], str | None]:
    """A function from the name of a parameter to the tensor of the base, made so that it knows ``names``.

    ``spellings`` tells the tensor for every name under which the base is known: what is stored, and what the
    model's class calls it. An adapter may have been made with another class, which puts the same modules
    under another prefix (``transformer.h.0…`` for ``h.0…``). So names that are not found as they are lose or gain
    one common prefix, the shortest that finds all of them.
    """
    strangers = [name for name in names if name not in spellings]
    fitting: dict[tuple[int, int], list[tuple[str, str]]] = {}
    for old, new in _exchanges(strangers[0], spellings) if strangers else ():
        if all(name.startswith(old) and new + name.removeprefix(old) in spellings for name in strangers):
            fitting.setdefault((old.count("."), new.count(".")), []).append((old, new))
    best = fitting[min(fitting)] if fitting else [("", "")]
    candidates = {spellings.get(new + strangers[0].removeprefix(old)) for old, new in best if strangers}
    if len(candidates) > 1:
        raise MergestreamError(
            f"{strangers[0]} may stand for {' or '.join(sorted(map(str, candidates)))} of the base: "
            "make the adapter with the class that the base's config.json names"
        )
    old, new = best[0]

    def translate(name: str) -> str | None:
        if name not in spellings and name.startswith(old):
            name = new + name.removeprefix(old)
        return spellings.get(name)

    return translate


def _exchanges(name: str, spellings: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(prefix to drop, prefix to add), one of them empty, that turn ``name`` into one that the base has.

    A number is never part of a prefix: another layer is not the same module.
    """
    pieces = name.split(".")
    for dropped in range(1, len(pieces) - 1):
        if pieces[dropped - 1].isdigit():
            break
        old = "".join(f"{piece}." for piece in pieces[:dropped])
        if name.removeprefix(old) in spellings:
            yield old, ""
    for known in spellings:
        new = known.removesuffix(name)
        if known.endswith(f".{name}") and not any(piece.isdigit() for piece in new.split(".")):
            yield "", new
