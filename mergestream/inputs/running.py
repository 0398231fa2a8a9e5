"""Run a model on one sample at a time, so that there is no padding: its layers, and its pooled features."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from mergestream.inputs.reading import NEW_TOKENS, Call, Sample, explained, open_image

MAX_TOKENS = 2048
"""Longer text is cut"""
RECORD = {"text", "text_pair", "messages", "prompt", "completion", "image"}
"""Fields of records that a processor turns into arguments; any other mapping holds arguments"""
Arguments = dict[str, Any]


@dataclass
class Runner:
    """A model, and how it is run on a sample."""

    model: nn.Module
    processor: Any | None = None
    call: Call | None = None
    new_tokens: int = NEW_TOKENS
    device: str = "cpu"
    _answers: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    """What the model has answered, by the place of the sample and the number of its input"""

    def answer(self, sample: Sample) -> None:
        """Let a generative model write its answer, greedily, where none is given."""
        if self.call or not self._is_plain(sample) or not self._generates or self.new_tokens <= 0:
            return
        with torch.inference_mode(), explained(f"{sample.where} cannot be run by the model"):
            for number, (prompt, full) in enumerate(self._arguments(sample)):
                if full is None:
                    output = self.model.generate(  # type: ignore[operator]
                        **_moved(prompt, self.device), max_new_tokens=self.new_tokens, do_sample=False, num_beams=1
                    )
                    begun = 1 if self._is_encoder_decoder else prompt["input_ids"].shape[1]
                    self._answers[sample.where, number] = output[:, begun:].cpu().clone()

    def run(self, sample: Sample) -> None:
        """Run one forward pass; a generative model sees the prompt and the answer, the given one or its own."""
        with explained(f"{sample.where} cannot be run by the model"):
            if self.call or not self._is_plain(sample):
                self._call(sample)
                return
            for number, (prompt, full) in enumerate(self._arguments(sample)):
                self._forward(full or self._with_answer(prompt, self._answers.get((sample.where, number))))

    def features(self, sample: Sample) -> Tensor | None:
        """Pooled features, one row per input: the mean of the last hidden state, or what a vision model pools.

        A generative model sees the prompt only: a router must choose before there is an answer.
        """
        with torch.inference_mode(), explained(f"{sample.where} cannot be run by the model"):
            if self.call or not self._is_plain(sample):
                return _pooled(self._call(sample), False)
            rows = [
                _pooled(self._forward(prompt, output_hidden_states=True), "pixel_values" in prompt)
                for prompt, _ in self._arguments(sample)
            ]
        return torch.cat([row for row in rows if row is not None]) if None not in rows else None

    def _is_plain(self, sample: Sample) -> bool:
        """Whether the sample is a record or named tensors, and the model takes arguments by name."""
        return isinstance(sample.value, Mapping) and hasattr(self.model, "config")

    def _call(self, sample: Sample) -> Any:
        value = _moved(sample.value, self.device)
        if self.call:
            return self.call(self.model, value)
        return self.model(**value) if isinstance(value, Mapping) else self.model(value)

    # --- arguments of the model -----------------------------------------------------------------------------

    def _arguments(self, sample: Sample) -> Iterator[tuple[Arguments, Arguments | None]]:
        """The arguments of each input: its prompt, and prompt and answer where the answer is given."""
        value = sample.value
        if not value.keys() <= RECORD:
            for row in _single_rows(value):
                yield self._accepted(row), None
        elif "image" in value:
            processor = getattr(self._processor, "image_processor", self._processor)
            yield self._accepted(processor(images=open_image(value["image"]), return_tensors="pt")), None
        elif "messages" in value:
            yield self._conversation(value["messages"])
        else:
            text = value.get("text", value.get("prompt"))
            prompt = self._accepted(self._tokenizer(text, value.get("text_pair"), **self._options))
            if "completion" not in value or not self._generates:
                yield prompt, None
                return
            if self._is_encoder_decoder:
                answer = self._tokenizer(text_target=value["completion"], **self._options)
            else:
                answer = self._tokenizer(value["completion"], add_special_tokens=False, **self._options)
            yield prompt, self._with_answer(prompt, answer["input_ids"])

    def _conversation(self, messages: list[Any]) -> tuple[Arguments, Arguments | None]:
        def template(part: list[Any], prompt: bool) -> Arguments:
            options = {"add_generation_prompt": prompt, "tokenize": True, "return_dict": True, **self._options}
            return self._accepted(self._tokenizer.apply_chat_template(part, **options))

        if messages[-1]["role"] != "assistant" or len(messages) == 1:
            return template(messages, True), None
        return template(messages[:-1], True), template(messages, False)

    def _with_answer(self, prompt: Arguments, answer: Tensor | None) -> Arguments:
        """The arguments to see an answer as if the model had written it."""
        if self._is_encoder_decoder:
            config: Any = self.model.config
            starts = [getattr(part, "decoder_start_token_id", None) for part in (self.model.generation_config, config)]
            start = torch.tensor([[next(token for token in (*starts, config.pad_token_id, 0) if token is not None)]])
            return {**prompt, "decoder_input_ids": start if answer is None else torch.cat([start, answer], 1)}
        if answer is None or "input_ids" not in prompt:
            return prompt
        found = {**prompt, "input_ids": torch.cat([prompt["input_ids"], answer.to(prompt["input_ids"])], 1)}
        if "attention_mask" in prompt:
            found["attention_mask"] = torch.ones_like(found["input_ids"])
        return found

    def _forward(self, arguments: Arguments, **options: Any) -> Any:
        method: Any = self.model
        if self._is_encoder_decoder and not arguments.keys() & {"decoder_input_ids", "decoder_inputs_embeds"}:
            arguments = self._with_answer(arguments, None)
        if hasattr(method, "get_image_features") and hasattr(method, "get_text_features"):  # two towers, like CLIP
            if "input_ids" not in arguments:
                method, options = method.get_image_features, {}
            elif "pixel_values" not in arguments:
                method, options = method.get_text_features, {}
        return method(**_moved(arguments, self.device), **options)

    # --- the model and its processor ------------------------------------------------------------------------

    @property
    def _processor(self) -> Any:
        if self.processor is None:
            raise ValueError("there is no tokenizer or image processor beside the model; give its arguments as .npz")
        return self.processor

    @cached_property
    def _tokenizer(self) -> Any:
        return getattr(self._processor, "tokenizer", self._processor)

    @cached_property
    def _generates(self) -> bool:
        return bool(self.model.can_generate())  # type: ignore[operator]

    @cached_property
    def _is_encoder_decoder(self) -> bool:
        return bool(self.model.config.is_encoder_decoder)  # type: ignore[union-attr]

    @cached_property
    def _options(self) -> dict[str, Any]:
        """How a tokenizer is called: a text is cut to what the model takes, with room for an answer."""
        config: Any = self.model.config
        positions = getattr(config.get_text_config(), "max_position_embeddings", None) or MAX_TOKENS
        for path, module in self.model.named_modules():
            if path.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
                positions -= module.padding_idx + 1  # like RoBERTa, which counts from there
        most = int(min(MAX_TOKENS, positions, self._tokenizer.model_max_length))
        if self._generates and not self._is_encoder_decoder:
            most = max(1, most - self.new_tokens)
        return {"truncation": True, "max_length": most, "return_tensors": "pt"}

    def _accepted(self, arguments: Mapping[str, Any]) -> Arguments:
        """The arguments that the model takes; a tokenizer may give more."""
        names = inspect.signature(self.model.forward).parameters
        dropped = {"token_type_ids"} if self._generates else set()  # GPT-2 would add word embeddings for them
        return {name: value for name, value in arguments.items() if name in names and name not in dropped}


def _single_rows(arguments: Mapping[str, Any]) -> Iterator[Arguments]:
    """One input at a time, without the padding that the attention mask marks."""
    mask = arguments.get("attention_mask")
    if mask is None or mask.ndim != 2:
        yield dict(arguments)
        return
    for row in range(len(mask)):
        single = {name: value[row : row + 1] for name, value in arguments.items()}
        masks = {of_decoder: single.get(f"{'decoder_' * of_decoder}attention_mask") for of_decoder in (False, True)}
        for name, value in single.items():
            used = masks[name.startswith("decoder_")]
            is_tokens = value.ndim == 2 or name.endswith("inputs_embeds")
            if is_tokens and used is not None and used.shape == value.shape[:2]:
                single[name] = value[:, used[0].bool()]
        yield single


def _pooled(output: Any, is_vision: bool) -> Tensor | None:
    """One row of features per input; None where the output has no hidden state."""
    if not isinstance(output, Tensor):
        pooled, states = getattr(output, "pooler_output", None), getattr(output, "hidden_states", None) or [None]
        known = [getattr(output, f"{part}last_hidden_state", None) for part in ("encoder_", "")]
        hidden = next((state for state in (*known, states[-1]) if state is not None), None)
        output = pooled if pooled is not None and (is_vision or hidden is None) else hidden
    if not isinstance(output, Tensor) or not output.is_floating_point():
        return None
    if output.ndim == 1:
        output = output[None]
    mean: Tensor = output.flatten(2).mean(2) if output.ndim == 4 else output.mean(1) if output.ndim == 3 else output
    return mean.flatten(1).double().cpu()


def _moved(value: Any, device: str) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {name: _moved(part, device) for name, part in value.items()}
    return type(value)(_moved(part, device) for part in value) if type(value) in (list, tuple) else value
