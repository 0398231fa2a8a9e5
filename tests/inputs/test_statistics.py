"""The statistics of an expert's inputs, for several families, against formulas with padded batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from mergestream.engine import LocalEngine
from mergestream.errors import MergestreamError
from mergestream.inputs.reading import Inputs, Sample, read_inputs
from mergestream.progress import NoProgress
from tests import speaking
from tests.inputs import conftest as families
from tests.inputs.conftest import TEXTS, assert_moments, expected_moments, expert_of, measure, save_with_companions
from tests.workshop import Workshop, peft, transformers


def tokenizer(place: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(place)


def padded(place: Path, texts: list[str] = TEXTS) -> dict[str, torch.Tensor]:
    return dict(tokenizer(place)(texts, padding=True, return_tensors="pt"))


def forced(place: Path, prompts: list[str], answers: list[str]) -> dict[str, torch.Tensor]:
    """Prompt and answer side by side, padded on the right."""
    return padded(place, [f"{prompt} {answer}" for prompt, answer in zip(prompts, answers, strict=True)])


def test_an_encoder(tmp_path: Path, texts: list[Sample]) -> None:
    base = save_with_companions(families.bert(), tmp_path / "base")
    expert = expert_of(base, tmp_path / "expert")
    batch = padded(base)
    model = speaking.auto(expert).eval()
    expected = expected_moments(
        model, lambda model: model(**batch), {batch["input_ids"].shape[1]: batch["attention_mask"]}
    )
    found = measure(base, expert, texts)
    assert_moments(found, expected)
    assert found.count == len(TEXTS)
    layer = "bert.encoder.layer.0.attention.self"
    shared = found.layers.shared
    assert shared[f"{layer}.key.weight"] == shared[f"{layer}.value.weight"] == shared[f"{layer}.query.weight"]
    assert len(found.layers.moments) == 2 * 4 + 2, "q, k and v share one, beside output, up and down"

    states = speaking.auto(base).eval()(**batch, output_hidden_states=True).hidden_states[-1].detach()
    weights = batch["attention_mask"][..., None].double()
    features = (states * weights).sum(1) / weights.sum(1)
    assert found.features is not None
    torch.testing.assert_close(found.features.mean, features.mean(0))
    centred = features - features.mean(0)
    scatter = found.features.scatter.apply(torch.eye(16))
    torch.testing.assert_close(scatter, centred.T @ centred, rtol=1e-5, atol=1e-6)


def test_a_causal_model_sees_prompt_and_given_answer(tmp_path: Path) -> None:
    base = save_with_companions(families.llama(), tmp_path / "base")
    expert = expert_of(base, tmp_path / "expert")
    prompts, answers = ["the cat", "a dog and a mat", "on"], ["sat on", "ran", "off and off"]
    records = [{"prompt": a, "completion": b} for a, b in zip(prompts, answers, strict=True)]
    batch = forced(base, prompts, answers)
    expected = expected_moments(
        speaking.auto(expert).eval(),
        lambda model: model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]),
        {batch["input_ids"].shape[1]: batch["attention_mask"]},
    )
    found = measure(base, expert, read_inputs(records, progress=NoProgress()))
    assert_moments(found, expected)
    assert found.layers.shared["model.layers.0.mlp.up_proj.weight"] == "model.layers.0.mlp.gate_proj.weight"


@pytest.mark.parametrize("family", [families.llama, families.gpt2])
def test_a_causal_model_writes_its_own_answer(tmp_path: Path, family: Any) -> None:
    base = save_with_companions(family(), tmp_path / "base")
    expert = expert_of(base, tmp_path / "expert")
    model, tokens = speaking.auto(expert).eval(), tokenizer(base)
    rows = []
    for text in TEXTS:
        ids = tokens(text, return_tensors="pt").input_ids
        for _ in range(4):  # greedy, one token at a time
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
            if int(ids[0, -1]) == 1:
                break
        rows.append(ids)
    expected = expected_moments(model, lambda model: [model(ids) for ids in rows])
    found = measure(base, expert, read_inputs(TEXTS, progress=NoProgress()), Inputs([], tokens=4))
    assert_moments(found, expected, leave=["lm_head.weight"] if family is families.gpt2 else [])


def test_an_encoder_decoder(tmp_path: Path) -> None:
    base = save_with_companions(families.t5(), tmp_path / "base")
    expert = expert_of(base, tmp_path / "expert")
    records = [{"prompt": text, "completion": "the cat sat"} for text in TEXTS]
    batch, answer = padded(base), tokenizer(base)("the cat sat", return_tensors="pt").input_ids
    start = torch.cat([torch.zeros(1, 1, dtype=torch.long), answer], 1).expand(len(TEXTS), -1)
    masks = {batch["input_ids"].shape[1]: batch["attention_mask"], start.shape[1]: torch.ones_like(start)}
    ids, mask = batch["input_ids"], batch["attention_mask"]
    model = speaking.auto(expert).eval()
    expected = expected_moments(
        model, lambda model: model(input_ids=ids, attention_mask=mask, decoder_input_ids=start), masks
    )
    found = measure(base, expert, read_inputs(records, progress=NoProgress()))
    assert_moments(found, expected, leave=["lm_head.weight"])
    cross = "decoder.block.{}.layer.1.EncDecAttention.{}.weight"
    assert found.layers.shared[cross.format(1, "v")] == cross.format(0, "k"), "all cross attention sees one input"
    assert measure(base, expert, read_inputs(TEXTS, progress=NoProgress()), Inputs([], tokens=3)).features is not None


@pytest.mark.parametrize("family", [families.vit, families.clip_vision])
def test_a_vision_model(tmp_path: Path, family: Any) -> None:
    base = save_with_companions(family(), tmp_path / "base")
    expert = expert_of(base, tmp_path / "expert")
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    torch.manual_seed(0)
    for number in range(3):
        Image.fromarray(torch.randint(0, 255, (9, 7, 3), dtype=torch.uint8).numpy()).save(pictures / f"{number}.png")
    processor = transformers.AutoImageProcessor.from_pretrained(base)
    images = [Image.open(pictures / f"{number}.png") for number in range(3)]
    pixels = processor(images=images, return_tensors="pt")["pixel_values"].double()
    found = measure(base, expert, read_inputs(pictures, progress=NoProgress()))
    assert_moments(
        found, expected_moments(speaking.auto(expert).eval(), lambda model: model(pixel_values=pixels)), base=base
    )
    output = speaking.auto(base).eval()(pixel_values=pixels, output_hidden_states=True)
    features = output.pooler_output if family is families.clip_vision else output.hidden_states[-1].mean(1)
    assert found.features is not None
    torch.testing.assert_close(found.features.mean, features.mean(0).detach())


def test_an_adapter_runs_on_its_base(tmp_path: Path, workshop: Workshop, texts: list[Sample]) -> None:
    base = save_with_companions(families.llama(), tmp_path / "base")
    adapter = workshop.adapter(base, r=2, target_modules=["q_proj", "down_proj"])
    found = measure(base, adapter, texts, Inputs([], tokens=0))
    merged = peft.PeftModel.from_pretrained(workshop.load(base), adapter).merge_and_unload().eval()
    batch = padded(base)
    batch.pop("token_type_ids", None)
    mask = {batch["input_ids"].shape[1]: batch["attention_mask"]}
    assert_moments(found, expected_moments(merged, lambda model: model(**batch), mask))


def test_arrays_with_padding(tmp_path: Path) -> None:
    """Masked positions do not count, on either side."""
    base = save_with_companions(families.bert(), tmp_path / "base")
    batch = padded(base)
    ids = torch.full_like(batch["input_ids"], 12)
    mask = torch.zeros_like(ids)
    for row, used in enumerate(batch["attention_mask"].sum(1).tolist()):
        ids[row, -used:], mask[row, -used:] = batch["input_ids"][row, :used], 1
    one = measure(base, base, [Sample({"input_ids": ids, "attention_mask": mask}, "a"), Sample(dict(batch), "b")])
    two = measure(base, base, read_inputs(TEXTS, progress=NoProgress()))
    for name, moment in two.layers.moments.items():
        eye = torch.eye(moment.vectors.shape[1])
        torch.testing.assert_close(one.layers.moments[name].apply(eye), moment.apply(eye), rtol=1e-9, atol=1e-11)


def test_less_memory_takes_more_passes_and_gives_the_same(tmp_path: Path, texts: list[Sample]) -> None:
    base = save_with_companions(families.bert(), tmp_path / "base")
    weights = sum(p.numel() * 8 for p in speaking.auto(base).parameters())
    plenty = measure(base, base, texts)
    tight = measure(base, base, texts, engine=LocalEngine(max_memory=weights + 25_000))
    assert tight.layers.shared == plenty.layers.shared
    for name, moment in plenty.layers.moments.items():
        assert torch.equal(moment.values, tight.layers.moments[name].values)
    with pytest.raises(MergestreamError, match=r"needs .* of memory, more than the"):
        measure(base, base, texts, engine=LocalEngine(max_memory=1000))
    with pytest.raises(MergestreamError, match=r"second moment of the input of .* needs .* of memory beside the model"):
        measure(base, base, texts, engine=LocalEngine(max_memory=weights + 1000))


def test_weights_that_are_tied_or_used_twice(tmp_path: Path) -> None:
    """All calls of a shared layer count."""

    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(4, 4, dtype=torch.float64)
            self.second = torch.nn.Linear(4, 4, dtype=torch.float64)
            self.third = torch.nn.Linear(4, 4, dtype=torch.float64)
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            return self.third(y.relu_()) + self.second(y) + self.first(y)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    module = Twice()
    items = [torch.randn(3, 4, dtype=torch.float64) for _ in range(5)]
    samples = read_inputs(items, progress=NoProgress())
    found = measure(module, module, samples, Inputs([], model=module))
    x = torch.cat(items)
    y = module.first(x).relu()
    inputs = {"first.weight": torch.cat([x, y, y]), "third.weight": y}
    assert_moments(found, {name: (rows.T @ rows / len(rows)).detach() for name, rows in inputs.items()})
    assert found.features is not None
    assert found.features.count == 15


def test_layers_that_differ_only_later_are_told_apart(tmp_path: Path) -> None:
    """A layer that the first sample does not separate from another gets a moment of its own."""

    class Gated(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always = torch.nn.Linear(4, 4, bias=False)
            self.sometimes = torch.nn.Linear(4, 4, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.always(x)
            return self.sometimes(x) if x[0, 0] > 0 else y  # type: ignore[no-any-return]

    items = [torch.randn(2, 4).abs() * sign for sign in (1, -1, 1)]
    module = Gated()
    found = measure(module.state_dict(), module, read_inputs(items, progress=NoProgress()), Inputs([], model=module))
    one, two = torch.cat(items).double(), torch.cat([items[0], items[2]]).double()
    assert_moments(found, {"always.weight": one.T @ one / 6, "sometimes.weight": two.T @ two / 4})


def test_a_callable_runs_the_model_and_gives_features(tmp_path: Path) -> None:
    base = save_with_companions(families.bert(), tmp_path / "base")
    seen = []

    def call(model: Any, item: Any) -> Any:
        seen.append(item)
        return model(input_ids=torch.tensor([item])).logits

    items = [[2, 3, 4], [5, 6]]
    found = measure(base, base, read_inputs(items, progress=NoProgress()), Inputs([], call=call))
    assert items[1] in seen
    model = speaking.auto(base).eval()
    assert_moments(found, expected_moments(model, lambda model: [model(input_ids=torch.tensor([i])) for i in items]))
    logits = torch.cat([model(input_ids=torch.tensor([item])).logits for item in items]).detach()
    assert found.features is not None
    torch.testing.assert_close(found.features.mean, logits.mean(0))
    without = measure(
        base, base, read_inputs(items, progress=NoProgress()), Inputs([], call=lambda *item: [call(*item)])
    )
    assert without.features is None


def test_bad_activations_and_bad_inputs_name_the_sample(tmp_path: Path) -> None:
    base = save_with_companions(families.bert(), tmp_path / "base")
    samples = read_inputs([{"input_ids": torch.tensor([[2, 3]])}, {"input_ids": torch.tensor([[2, 99]])}])
    with pytest.raises(MergestreamError, match="input 2 cannot be run by the model: index out of range"):
        measure(base, base, samples)
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    samples = read_inputs([torch.ones(1, 2), torch.tensor([[1.0, float("nan")]])])
    with pytest.raises(MergestreamError, match=r"input 2: the input of the layer 0\.weight holds NaN or Inf"):
        measure(module.state_dict(), module, samples, Inputs([], model=module))
