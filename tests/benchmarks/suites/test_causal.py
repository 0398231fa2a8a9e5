"""Generative bases out of foreign files, and how their answers are scored."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.suites import causal
from benchmarks.suites.backbones import write_checkpoint
from benchmarks.suites.causal import (
    END,
    Encoded,
    answer_logits,
    answer_loss,
    chooses_answers,
    converted_from_llama2c,
    dequantised,
    encode,
    perplexity,
    read_llama2c,
    share_right,
    writes_answers,
)
from mergestream import Store
from tests.gguf_files import write_gguf

WIDTH, HIDDEN, LAYERS, HEADS, KV_HEADS, POSITIONS = 16, 24, 2, 4, 2, 32
PIECES = ["▁", "a", "b", "c", "▁a", "ab", "▁ab", "bc", "▁abc", "cab"]
VOCABULARY = causal.BYTES_FROM + 256 + len(PIECES)


def vocabulary_bytes() -> bytes:
    """A tokenizer as llama2.c's exporter writes it: longer pieces have higher scores than their parts' merges need."""
    written = [b"<unk>", b"\n<s>\n", b"\n</s>\n", *(chr(byte).encode() for byte in range(256))]
    written += [piece.replace("▁", " ").encode() for piece in PIECES]
    scores = [0.0] * (causal.BYTES_FROM + 256) + [-float(number) for number in range(len(PIECES))]
    parts = [struct.pack("<fi", score, len(piece)) + piece for score, piece in zip(scores, written, strict=True)]
    return struct.pack("<i", max(map(len, written))) + b"".join(parts)


def llama2c_bytes(tied: bool = True) -> tuple[bytes, dict[str, Tensor]]:
    """A checkpoint of random weights in llama2.c's first format, and the weights by llama2.c's names."""
    generator = torch.Generator().manual_seed(0)
    kv_width = WIDTH // HEADS * KV_HEADS
    shapes = {
        "embedding": (VOCABULARY, WIDTH),
        "rms_att": (LAYERS, WIDTH),
        "wq": (LAYERS, WIDTH, WIDTH),
        "wk": (LAYERS, kv_width, WIDTH),
        "wv": (LAYERS, kv_width, WIDTH),
        "wo": (LAYERS, WIDTH, WIDTH),
        "rms_ffn": (LAYERS, WIDTH),
        "w1": (LAYERS, HIDDEN, WIDTH),
        "w2": (LAYERS, WIDTH, HIDDEN),
        "w3": (LAYERS, HIDDEN, WIDTH),
        "rms_final": (WIDTH,),
        "freq_cis": (2, POSITIONS, WIDTH // HEADS // 2),
        **({} if tied else {"wcls": (VOCABULARY, WIDTH)}),
    }
    weights = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    header = causal.HEADER.pack(WIDTH, HIDDEN, LAYERS, HEADS, KV_HEADS, VOCABULARY if tied else -VOCABULARY, POSITIONS)
    return header + b"".join(tensor.numpy().tobytes() for tensor in weights.values()), weights


def llama2c_logits(w: dict[str, Tensor], tokens: list[int]) -> Tensor:
    """What llama2.c's run.c computes: heads are rotated in pairs of neighbours."""

    def rms(x: Tensor, weight: Tensor) -> Tensor:
        return weight * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()

    def rotate(x: Tensor) -> Tensor:
        frequencies = 10000.0 ** (-torch.arange(0, x.shape[-1], 2) / x.shape[-1])
        angles = torch.outer(torch.arange(len(x)).float(), frequencies)
        turned = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * torch.polar(torch.ones(()), angles)[:, None]
        return torch.view_as_real(turned).flatten(-2)

    x, size = w["embedding"][tokens], WIDTH // HEADS
    for n in range(LAYERS):
        h = rms(x, w["rms_att"][n])
        q, k, v = ((h @ w[name][n].T).reshape(len(tokens), -1, size) for name in ("wq", "wk", "wv"))
        q, k, v = rotate(q), *(each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (rotate(k), v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(size)
        scores += torch.full(scores.shape[1:], -torch.inf).triu(1)
        x = x + torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1) @ w["wo"][n].T
        h = rms(x, w["rms_ffn"][n])
        x = x + (torch.nn.functional.silu(h @ w["w1"][n].T) * (h @ w["w3"][n].T)) @ w["w2"][n].T
    return rms(x, w["rms_final"]) @ w.get("wcls", w["embedding"]).T


@pytest.fixture
def stories(tmp_path: Path) -> Path:
    """A tiny model that was converted from llama2.c."""
    (tmp_path / "llama2.data").write_bytes(llama2c_bytes()[0] + vocabulary_bytes())
    (tmp_path / "base").mkdir()
    converted_from_llama2c(tmp_path / "llama2.data", tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_of_llama2c_computes_the_same(tied: bool, tmp_path: Path) -> None:
    content, weights = llama2c_bytes(tied)
    config, tensors, size = read_llama2c(content + b"the tokenizer")
    assert size == len(content)
    write_checkpoint(tmp_path, tensors, config)
    model = LlamaForCausalLM.from_pretrained(tmp_path)
    tokens = [1, 260, 7, 42, 261, 3, 9]
    with torch.inference_mode():
        found = model(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(found, llama2c_logits(weights, tokens), rtol=1e-4, atol=1e-4)
    assert config["tie_word_embeddings"] is tied
    assert Store.create(tmp_path / "store", base=tmp_path).path.is_dir()


def test_its_tokenizer_merges_by_score(stories: Path) -> None:
    tokenizer = Tokenizer.from_file(str(stories / "tokenizer.json"))
    # "▁a" has a higher score than "ab", and no piece is "▁ab" + "c" before "▁abc" is
    assert tokenizer.encode("abc").tokens == ["<s>", "▁abc"]
    assert tokenizer.encode("ba cab").tokens == ["<s>", "▁", "b", "a", "▁", "cab"]
    assert tokenizer.encode("a\nz").tokens == ["<s>", "▁a", "<0x0A>", "<0x7A>"], "what has no piece is bytes"
    for text in ("abc", "ba cab", "a\nz é 猫"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_gguf_model_is_dequantised(tmp_path: Path) -> None:
    kept = write_gguf(tmp_path / "tiny.gguf")
    base = tmp_path / "base"
    base.mkdir()
    dequantised(tmp_path / "tiny.gguf", base)
    config = json.loads((base / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["tie_word_embeddings"]
    assert "quantization_config" not in config and str(tmp_path) not in (base / "config.json").read_text()
    assert "dequantised" in (base / "README.md").read_text()
    weights = LlamaForCausalLM.from_pretrained(base).state_dict()
    assert torch.equal(weights["model.embed_tokens.weight"], kept["token_embd.weight"])
    assert torch.equal(weights["model.layers.0.mlp.down_proj.weight"], kept["blk.0.ffn_down.weight"])
    assert torch.equal(weights["model.norm.weight"], kept["output_norm.weight"])
    assert Tokenizer.from_file(str(base / "tokenizer.json")).token_to_id("<|im_end|>") == END
    assert Store.create(tmp_path / "store", base=base).path.is_dir(), "the base is not taken for a quantised one"


# --- answers -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=40,
        bos_token_id=1,
        eos_token_id=END,
        initializer_range=0.5,
    )
    model = LlamaForCausalLM(config)
    model.eval()
    return model


def greedy(model: LlamaForCausalLM, prompt: list[int], length: int) -> list[int]:
    options: dict[str, Any] = {"max_new_tokens": length, "do_sample": False, "pad_token_id": 0}
    written: Any = model.generate(torch.tensor([prompt]), **options)  # type: ignore[misc]
    found: list[int] = written[0, len(prompt) :].tolist()
    return found


PROMPTS = [[1, 7, 30, 12], [1, 5], [1, 20, 21, 22, 23, 24, 25], [1, 33, 8]]


def test_an_answer_is_right_where_greedy_decoding_writes_it(model: LlamaForCausalLM) -> None:
    written = [greedy(model, prompt, 3 + number) for number, prompt in enumerate(PROMPTS)]
    right = [Encoded(prompt, answer) for prompt, answer in zip(PROMPTS, written, strict=True)]
    assert writes_answers(model, right) == [True] * 4
    for place in range(3):  # one wrong token, wherever it is
        wrong = [Encoded(e.prompt, [t if n != place else (t + 1) % 40 for n, t in enumerate(e.answer)]) for e in right]
        assert writes_answers(model, wrong) == [False] * 4
        assert writes_answers(model, [right[0], wrong[1], right[2], wrong[3]]) == [True, False, True, False]
    assert share_right(model, [*right, wrong[0]], batch_size=2) == 0.8


def test_padding_changes_nothing(model: LlamaForCausalLM) -> None:
    batch = [Encoded(prompt, [9, 10, END][: number + 1]) for number, prompt in enumerate(PROMPTS[:3])]
    with torch.inference_mode():
        together, tokens, rows = answer_logits(model, batch)
        alone = torch.cat([answer_logits(model, [each])[0] for each in batch])
        expected = model(torch.tensor([[*batch[1].prompt, 9]])).logits[0, -2:]
    assert tokens.tolist() == [9, 9, 10, 9, 10, END] and rows.tolist() == [0, 1, 1, 2, 2, 2]
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(together[1:3], expected, rtol=1e-4, atol=1e-5)


def test_the_likeliest_of_the_choices_is_chosen(model: LlamaForCausalLM) -> None:
    choices = [5, 9, 30]
    with torch.inference_mode():
        best = [max(choices, key=lambda c: float(model(torch.tensor([p])).logits[0, -1, c])) for p in PROMPTS]
    right = [Encoded(prompt, [token, END]) for prompt, token in zip(PROMPTS, best, strict=True)]
    assert chooses_answers(model, right, choices) == [True] * 4
    other = [Encoded(e.prompt, [next(c for c in choices if c != e.answer[0]), END]) for e in right]
    assert share_right(model, [*right[:3], other[3]], choices) == 0.75
    with pytest.raises(AssertionError, match="first tokens"):
        share_right(model, right, [5, 5])


def test_the_loss_is_that_of_the_answers_alone(model: LlamaForCausalLM) -> None:
    batch = [Encoded(PROMPTS[0], [9, END])]
    with torch.inference_mode():
        log = model(torch.tensor([[*PROMPTS[0], 9]])).logits[0].log_softmax(-1)
        assert float(answer_loss(model, batch)) == pytest.approx(-float(log[3, 9] + log[4, END]) / 2, rel=1e-5)


def test_perplexity_is_that_of_the_definition(model: LlamaForCausalLM) -> None:
    passages = [[1, 5, 9, 13], [1, 6, 10, 14], [1, 7, 11, 15]]
    with torch.inference_mode():
        log = model(torch.tensor(passages)).logits.log_softmax(-1)
    total = sum(float(log[row, place, token]) for row, p in enumerate(passages) for place, token in enumerate(p[1:]))
    assert perplexity(model, passages, batch_size=2) == pytest.approx(math.exp(-total / 9), rel=1e-5)


def test_prompt_and_answer_are_encoded_as_one_text(stories: Path) -> None:
    tokenizer = Tokenizer.from_file(str(stories / "tokenizer.json"))
    found = encode(tokenizer, "ab:", "abc")
    assert tokenizer.decode(found.prompt + found.answer) == "ab: abc"
    assert found.prompt == tokenizer.encode("ab:").ids and found.answer[-1] == END
    assert tokenizer.id_to_token(found.answer[0]) == "▁abc"
