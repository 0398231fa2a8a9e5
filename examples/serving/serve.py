"""Serve all experts of a store from one copy of the base; every request names its expert.

The store is a ledger that LoRA adapters of a language model were added to::

    mergestream init store --base base
    mergestream add store adapters/legal adapters/medical
    python examples/serving/serve.py store base 'legal: Is a handshake a contract?' 'merged: What is a tort?'

It exports the adapters (as ``mergestream export store DIR --format loras`` does) and the merged one
(``--format lora``), loads them into one model with PEFT, answers each request with its expert, and counts the bytes.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from mergestream import Store

MERGED = "merged"


def write_adapters(store: Store, output: Path) -> dict[str, Path]:
    """Export every expert and the merged model as adapters; returns their directories by name."""
    store.export_adapters(output / "experts")
    store.export_adapter(output / MERGED)
    return {**{expert.name: output / "experts" / expert.name for expert in store.history}, MERGED: output / MERGED}


def load(base: Path, adapters: dict[str, Path]) -> PeftModel:
    """Load one model with all adapters."""
    first, *others = adapters
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapters[first], adapter_name=first)
    for name in others:
        model.load_adapter(adapters[name], adapter_name=name)
    return model.eval()


def answer(model: PeftModel, tokenizer: Any, expert: str, prompt: str, tokens: int = 40) -> str:
    """Answer with one expert; switching takes microseconds, because nothing is loaded or merged."""
    model.set_adapter(expert)
    asked = tokenizer(prompt, return_tensors="pt")
    with torch.inference_mode():
        generate: Any = model.generate
        written = generate(**asked, max_new_tokens=tokens, do_sample=False)
    text: str = tokenizer.decode(written[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


def size(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def sizes(store: Store, base: Path, adapters: dict[str, Path]) -> dict[str, int]:
    """Return the bytes of the store, of the adapters and of full models."""
    experts = [adapters[expert.name] for expert in store.history]
    weights = sum(file.stat().st_size for file in base.glob("*.safetensors"))
    return {
        "one store": size(Path(store.path)),
        f"{len(experts)} adapters": sum(map(size, experts)),
        f"{len(experts)} full models": len(experts) * weights,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("base", type=Path)
    parser.add_argument("requests", nargs="*", metavar="'EXPERT: PROMPT'")
    options = parser.parse_args(arguments)
    store = Store(options.store)
    with tempfile.TemporaryDirectory() as directory:
        adapters = write_adapters(store, Path(directory))
        model, tokenizer = load(options.base, adapters), AutoTokenizer.from_pretrained(options.base)
        for request in options.requests:
            expert, _, prompt = request.partition(": ")
            if expert not in adapters:
                parser.error(f"there is no expert {expert}; there are {', '.join(adapters)}")
            print(f"{expert}: {answer(model, tokenizer, expert, prompt)}")
        for what, count in sizes(store, options.base, adapters).items():
            print(f"{what}: {count / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
