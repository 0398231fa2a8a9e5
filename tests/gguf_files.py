"""Small GGUF files, written as llama.cpp's converter writes a Llama."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import torch
from gguf.quants import dequantize, quantize

WIDTH, VOCABULARY = 32, 64
WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "ab", *(chr(60 + n) for n in range(VOCABULARY - 4))]
SHAPES = {
    **{"token_embd.weight": (VOCABULARY, WIDTH), "output_norm.weight": (WIDTH,)},
    **{"blk.0.attn_q.weight": (WIDTH, WIDTH), "blk.0.attn_k.weight": (16, WIDTH), "blk.0.attn_v.weight": (16, WIDTH)},
    **{f"blk.0.{name}.weight": (WIDTH, WIDTH) for name in ("attn_output", "ffn_gate", "ffn_up", "ffn_down")},
    **{f"blk.0.{name}.weight": (WIDTH,) for name in ("attn_norm", "ffn_norm")},
}


def write_gguf(
    path: Path,
    seed: int = 0,
    *,
    architecture: str = "llama",
    kind: str = "Q8_0",
    blocks: int = 1,
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    header: Mapping[str, int] | None = None,
) -> dict[str, torch.Tensor]:
    """Write random weights, matrices as ``kind``; returns what they are dequantised to, by the names in the file.

    Files of different seeds are a little apart.
    """
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(blocks)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e5)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([3] * 3 + [1] * (VOCABULARY - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, number in (header or {}).items():
        writer.add_uint32(name, number)
    start, drift = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
    kept = {}
    for name, shape in shapes.items():
        weight = torch.randn(shape, generator=start) + 0.1 * seed * torch.randn(shape, generator=drift)
        stored = gguf.GGMLQuantizationType[kind if len(shape) > 1 else "F32"]
        data = quantize(weight.numpy(), stored)
        kept[name] = torch.from_numpy(dequantize(data, stored).reshape(shape))
        writer.add_tensor(name, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept
