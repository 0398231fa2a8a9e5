"""Every readout keeps the contract, and is its formula."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, cast

import pytest
import torch
from torch import Tensor

from mergestream import READOUTS, Ledger
from mergestream.errors import UsageError
from mergestream.ledger.merge import merge_entries
from mergestream.ledger.readouts.base import EntriesReadout
from mergestream.ledger.span import Entry
from mergestream.methods.base import Context
from mergestream.testing import Check, make_models, readout_checks
from tests.ledger import formulas
from tests.ledger.merging import ledger_of

NAMES = ["agree", "regress", "outputs", "tsv", "tempered", "iso", "sum"]
every_readout = pytest.mark.parametrize("readout", NAMES)


@pytest.mark.parametrize("check", readout_checks(*NAMES), ids=str)
def test_the_contract(check: Check) -> None:
    check()


def test_every_readout_is_under_contract() -> None:
    assert {*NAMES, "expert", "plain"} == {name for name in READOUTS if READOUTS.origin(name) == "mergestream"}


@every_readout
@pytest.mark.parametrize("entries", ["bfloat16", "float32"])
@pytest.mark.parametrize("count", [1, 2, 5, 12])
@pytest.mark.parametrize("budget", [0.7, 1.0, 3.0])
def test_it_is_the_batch_method_on_the_same_truncated_experts(
    readout: Any, entries: Literal["bfloat16", "float32"], count: int, budget: float
) -> None:
    base, *experts = models = make_models(count, torch.float64)
    method = Ledger(budget=budget, entries=entries)
    merged = ledger_of(models, range(1, count + 1), method).state_dict(1, readout=readout)
    expected = formulas.merged(base, experts, readout, budget=budget, entries=entries)
    for name in base:
        torch.testing.assert_close(merged[name] - base[name], expected[name], rtol=1e-6, atol=1e-8)


@every_readout
def test_weights_are_those_of_the_formula(readout: Any) -> None:
    base, *experts = models = make_models(3, torch.float64)
    weights = [0.5, 2.0, 1.25]
    merged = ledger_of(models, [1, 2, 3]).state_dict(
        1, readout=readout, weights={str(number): c for number, c in enumerate(weights, 1)}
    )
    expected = formulas.merged(base, experts, readout, weights)
    for name in base:
        torch.testing.assert_close(merged[name] - base[name], expected[name], rtol=1e-6, atol=1e-8)


@every_readout
def test_weights_too_thin_to_be_cut_and_stacks_of_weights_are_those_of_the_formula(readout: Any) -> None:
    shapes = {"thin.weight": (5, 30), "mlp.experts.up": (3, 20, 16)}
    base, *experts = models = make_models(3, torch.float64, shapes)
    weights = {"1": 0.5, "2": 2.0, "3": 1.25}
    merged = ledger_of(models, [1, 2, 3], Ledger(entries="float32")).state_dict(1, readout=readout, weights=weights)
    expected: dict[str, list[Tensor]] = {name: [] for name in shapes}
    for name in shapes:
        stacks = [(expert[name] - base[name]).reshape(-1, *base[name].shape[-2:]) for expert in experts]
        for deltas in zip(*stacks, strict=True):
            parts = [formulas.cut(x, 3, 8.0 if name == "thin.weight" else 1.0, "float32") for x in deltas]
            norms = [float(x.square().sum()) for x in deltas]
            expected[name].append(formulas.FORMULAS[readout](parts, norms, list(weights.values())))
        found = merged[name] - base[name]
        torch.testing.assert_close(found, torch.stack(expected[name]).reshape(found.shape), rtol=1e-5, atol=1e-7)


@every_readout
def test_a_weight_stored_input_by_output_is_merged_as_its_transpose(readout: Any) -> None:
    """As GPT-2's are: whose inputs an expert answers to must not depend on how a weight is stored."""
    generator = torch.Generator().manual_seed(0)
    method = Ledger(entries="float32")
    entries: list[list[Entry]] = [[], []]
    contexts = [Context(3, True, (40, 24), torch.float64), Context(3, True, (24, 40), torch.float64, transposed=True)]
    for scale in (1.0, 0.2, 4.0):
        delta = scale * torch.randn(40, 24, generator=generator, dtype=torch.float64)
        for stored, context, held in zip((delta, delta.T.contiguous()), contexts, entries, strict=True):
            held.append(Entry(cast("dict[str, Tensor]", method.absorb(None, stored, context).state)))
    chosen = READOUTS[readout]()
    assert isinstance(chosen, EntriesReadout)
    plain, transposed = (merge_entries(chosen, held, context) for held, context in zip(entries, contexts, strict=True))
    assert isinstance(transposed, Tensor)
    torch.testing.assert_close(transposed.T, plain, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("readout", ["agree", "outputs", "tsv", "tempered", "iso"])
@pytest.mark.parametrize("shape", [(160, 96), (96, 160)])
@pytest.mark.parametrize("decay", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("common", [0.0, 1.0])
def test_float32_gives_the_same_as_float64(readout: str, shape: tuple[int, int], decay: float, common: float) -> None:
    """Also where the experts share their directions, so that Gram matrices are singular, and for steep spectra."""
    generator, entries = torch.Generator().manual_seed(0), []
    shared = [torch.randn(size, 12, generator=generator) for size in shape]
    for number in range(8):
        own = [torch.randn(size, 12, generator=generator) for size in shape]
        left, right = (torch.linalg.qr(common * s + (1 - common) * o).Q.T for s, o in zip(shared, own, strict=True))
        sigma = 3.0**number * torch.arange(1, 13, dtype=torch.float64) ** -decay
        slots = {"left": left.bfloat16(), "sigma": sigma, "right": right.bfloat16()}
        entries.append(Entry({**slots, "norm2": 1.3 * sigma.square().sum()}, weight=1 + number / 2))
    merged = []
    for dtype in (torch.float32, torch.float64):
        value = merge_entries(READOUTS[readout](), entries, Context(8, True, shape, dtype))  # type: ignore[arg-type]
        assert isinstance(value, Tensor)
        merged.append(value.double())
    assert float((merged[0] - merged[1]).norm() / merged[1].norm()) < 2e-3


def test_a_readout_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of docs/how-to/extending.md."""
    text = (Path(__file__).parents[2] / "docs" / "how-to" / "extending.md").read_text(encoding="utf-8")
    (code,) = (block for block in text.split("```python\n")[1:] if "class Shy" in block)
    monkeypatch.setattr(READOUTS, "_registered", {})
    exec(code.partition("```")[0], {"__name__": "example"})
    for check in readout_checks("shy"):
        check()
    with pytest.raises(UsageError, match="is a readout of mergestream itself"):
        READOUTS.register("agree", READOUTS["shy"])


def test_one_expert_alone_is_what_every_readout_but_iso_gives_back() -> None:
    """Nothing disagrees: agree, tsv and the sum of one expert are its own leading directions."""
    models = make_models(1, torch.float64)
    merger = ledger_of(models, [1], Ledger(budget=8, entries="float32"))
    for readout in ("agree", "tsv", "sum", "expert:1"):
        merged = merger.state_dict(1, readout=readout)
        for name in models[0]:
            torch.testing.assert_close(merged[name], models[1][name], rtol=1e-6, atol=1e-6)


def test_an_expert_comes_back_with_all_that_its_entry_holds() -> None:
    """Alone it is not cut for others: what is stored of it is read."""
    models = make_models(10, torch.float64)
    merger = ledger_of(models, range(1, 11))
    for number, cut_at in ((1, 8), (10, 10)):
        back = merger.state_dict(readout=f"expert:{number}")
        expected = formulas.merged(models[0], [models[number]], "expert", cut_at=cut_at)
        for name in models[0]:
            torch.testing.assert_close(back[name] - models[0][name], expected[name], rtol=1e-9, atol=1e-12)


@every_readout
def test_damage_is_what_the_definition_says(readout: Any) -> None:
    base, *experts = models = make_models(3, torch.float64)
    merger = ledger_of(models, [1, 2, 3])
    from mergestream.ledger.selection import Selection

    reading = merger._reading(Selection(readout))
    found = reading.damage(merger._engine)
    expected = formulas.merged(base, experts, readout)
    for number, expert in enumerate(experts):
        shares = []
        for name in formulas.LINEAR:
            U, sigma, V = formulas.cut(expert[name] - base[name], 3, 1.0, "bfloat16")
            wrong = (expected[name] @ V - U * sigma) * sigma
            shares.append(float(wrong.square().sum() / sigma.pow(4).sum()))
        assert found[str(number + 1)] == pytest.approx(sum(shares) / 2, rel=1e-6)
