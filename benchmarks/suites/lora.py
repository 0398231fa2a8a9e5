"""Experts as LoRA adapters: trained, saved and loaded by PEFT, independently of mergestream."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.suites.training import Recipe

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LoRARecipe(Recipe):
    """The same training for the LoRA factors of every linear layer.

    Not tuned: α = 32 and ten times the rate of full fine-tuning (Schulman et al., *LoRA Without Regret*, 2025).
    """

    rank: int = 16
    alpha: int = 32
    targets: str = "all-linear"

    @staticmethod
    def like(recipe: Recipe) -> LoRARecipe:
        return LoRARecipe(**{**asdict(recipe), "learning_rate": 10 * recipe.learning_rate})

    def trainable(self, model: Any) -> torch.nn.Module:
        import torch
        from peft import LoraConfig, get_peft_model

        # PEFT records the base: use a name that is the same on every machine, not a path.
        model.name_or_path = model.config.name_or_path = Path(model.name_or_path).name
        config = LoraConfig(r=self.rank, lora_alpha=self.alpha, target_modules=self.targets)
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(self.seed)  # A is drawn at random
            return get_peft_model(model, config)

    def merged(self, trained: Any) -> torch.nn.Module:
        model: torch.nn.Module = trained.merge_and_unload()
        return model

    def save(self, trained: Any, base: Path, output: Path) -> None:
        trained.save_pretrained(output, save_embedding_layers=False)  # otherwise PEFT asks the hub for the vocabulary


def is_adapter(directory: Path) -> bool:
    return (directory / "adapter_config.json").is_file()


def adapted(model: torch.nn.Module, adapter: Path) -> torch.nn.Module:
    """Return the model with the adapter merged into it."""
    from peft import PeftModel

    merged: torch.nn.Module = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    return merged
