"""Tiny language models with tokenizers of their own, made by transformers, and experts with tokens added to them."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = ["<unk>", "<eos>", "the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "off"]


def tokenizer(words: Sequence[str] = WORDS) -> Any:
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="<eos>")


def gpt2(rows: int = len(WORDS), **options: Any) -> Any:
    """Its head is the embedding."""
    sizes: dict[str, Any] = {
        "n_embd": 8,
        "n_layer": 1,
        "n_head": 2,
        "n_positions": 16,
        "bos_token_id": 1,
        "eos_token_id": 1,
    }
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, vocab_size=rows, **options))


def llama(rows: int = len(WORDS)) -> Any:
    """Its head is a matrix of its own."""
    sizes: dict[str, Any] = {
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    ids: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 1, "tie_word_embeddings": False}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **ids, vocab_size=rows))


def bert(rows: int = len(WORDS)) -> Any:
    """Its head has a bias."""
    sizes: dict[str, Any] = {
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, vocab_size=rows, max_position_embeddings=16))


def save(place: Path, model: Any, tokens: Any = None) -> Path:
    model.save_pretrained(place)
    if tokens is not None:
        tokens.save_pretrained(place)
    return place


def expert_of(
    base: Path, place: Path, added: Sequence[str] = (), seed: int = 1, pad: int | None = None, rows: int | None = None
) -> Path:
    """A copy of the base with tokens added as people do it, and all weights moved a little; ``rows`` is how many its
    embedding has at least."""
    torch.manual_seed(seed)
    model, tokens = auto(base), transformers.AutoTokenizer.from_pretrained(base)
    tokens.add_tokens(list(added))
    model.resize_token_embeddings(max(len(tokens), rows or 0), pad_to_multiple_of=pad, mean_resizing=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += (0.003, 0.01, 0.005)[seed % 3] * torch.randn_like(parameter)
    return save(place, model, tokens)


def auto(place: Path) -> Any:
    """The model as its config has it."""
    config = transformers.AutoConfig.from_pretrained(place)
    return getattr(transformers, config.architectures[0]).from_pretrained(place)


def rows(place: Path, words: Sequence[str], output: bool = False) -> torch.Tensor:
    """The rows of these tokens in the embedding of a model, or in its head, by its own tokenizer."""
    model, tokens = _loaded(place)
    table = model.get_output_embeddings() if output else model.get_input_embeddings()
    numbers = tokens.convert_tokens_to_ids(list(words))
    assert len(set(numbers)) == len(words), "a token is not known"
    found: torch.Tensor = table.weight.detach()[numbers]
    return found


@lru_cache(maxsize=16)
def _loaded(place: Path) -> Any:
    return auto(place), transformers.AutoTokenizer.from_pretrained(place)
