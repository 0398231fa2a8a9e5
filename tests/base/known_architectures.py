"""Writes ``mergestream/base/known_architectures.json``: ``python -m tests.base.known_architectures``."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import mergestream.base
from mergestream.base.architecture import load_architecture, pattern_of

FILE = Path(mergestream.base.__file__).with_name("known_architectures.json")
CLASSES = (
    "BertForMaskedLM",
    "BertForSequenceClassification",
    "BertModel",
    "CLIPModel",
    "DistilBertForMaskedLM",
    "DistilBertForSequenceClassification",
    "GPT2LMHeadModel",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "GemmaForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "ModernBertForMaskedLM",
    "Olmo2ForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "RobertaForMaskedLM",
    "RobertaForSequenceClassification",
    "SmolLM3ForCausalLM",
    "T5ForConditionalGeneration",
    "ViTForImageClassification",
    "ViTModel",
)
SMALL = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_attention_heads"), 2),
    **{"num_key_value_heads": 1, "hidden_size": 32, "vocab_size": 40, "pad_token_id": 0},
}
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"attention_bias": True, "mlp_bias": True, "feed_forward_proj": "gated-gelu"},
)


def describe(name: str, directory: Path) -> dict[str, Any]:
    """Describe a class as `mergestream.base.architecture` reads it."""
    import transformers

    model_class = getattr(transformers, name)
    config_class = model_class.config_class
    slots: dict[str, list[str]] = {}
    ties: dict[bool, list[tuple[str, ...]]] = {}
    for tied in (False, True):
        for variant in VARIANTS:
            config = {"architectures": [name], "model_type": config_class.model_type, "tie_word_embeddings": tied}
            (directory / "config.json").write_text(json.dumps({**config, **SMALL, **variant}))
            architecture = load_architecture(directory)
            assert architecture.name == name, architecture.unknown
            for slot, item in architecture.slots.items():
                kind = f"{item.kind} {item.module or item.owner.partition(' of ')[2]}"
                listed = slots.setdefault(kind, [])
                if pattern_of(slot) not in listed:
                    listed.append(pattern_of(slot))
            ties[tied] = list(architecture.ties)
    return {
        "prefix": model_class.base_model_prefix,
        "tied_by_default": bool(getattr(config_class(), "tie_word_embeddings", True)),
        "ties": ties[True],
        "untied": ties[False],
        "slots": {kind: sorted(names) for kind, names in sorted(slots.items())},
    }


def describe_all() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        return {name: describe(name, Path(directory)) for name in CLASSES}


if __name__ == "__main__":
    FILE.write_text(json.dumps(describe_all(), indent=1) + "\n")
