"""What the model answers to a few rows of the validation data, written down at each evaluation."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from verl.utils.tracking import ValidationGenerationsLogger

from megatrain_verl.streaming.engine import StreamingEngine
from megatrain_verl.streaming.generation import greedy
from megatrain_verl.verl_backend.micro_batches import row_images

SHOWN = 300  # characters of a text on the console


@dataclass
class Sample:
    """A prompt with its images, and the answer that the data has for it, as token ids."""

    prompt: list[int]
    answer: list[int]
    images: dict[str, Tensor] | None = None

    @classmethod
    def of_row(cls, row: dict[str, Any], image_token: int | None = None) -> "Sample | None":
        """Up to the first trained token, and the trained tokens that follow at once.

        A row that is trained from its start (`data.train_on_prompt`) is cut in half. None for a row with images behind
        the prompt.
        """
        ids, mask = row["input_ids"].tolist(), row["loss_mask"].tolist()
        start = mask.index(1) if 1 in mask else len(ids)
        end = mask.index(0, start) if 0 in mask[start:] else len(ids)
        if start < 2:
            start, end = (len(ids) + 1) // 2, len(ids)
        images = row_images(row.get("multi_modal_inputs"))
        if images is not None and image_token in ids[start:]:
            return None
        return cls(ids[:start], ids[start:end], images)


class SampleWriter:
    """Generates and writes samples: a JSON line per evaluation in `file`, and to the console and trackers.

    Args:
        samples: what to generate from.
        stop_tokens: of the model's generation config.
        max_new_tokens: per sample; each costs a forward pass, see `streaming/generation.py`.
        trackers: names of verl's trackers, of which wandb, tensorboard and others show texts.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        tokenizer: PreTrainedTokenizerBase,
        stop_tokens: list[int],
        max_new_tokens: int,
        file: Path,
        trackers: list[str],
    ) -> None:
        self._samples, self._tokenizer, self._stop_tokens = samples, tokenizer, stop_tokens
        self._max_new_tokens, self._file, self._trackers = max_new_tokens, file, trackers
        self._logger = ValidationGenerationsLogger()

    def write(self, engine: StreamingEngine, step: int) -> None:
        """Generate greedily with the weights of now and write down what came."""
        prompts, images = zip(*((sample.prompt, sample.images) for sample in self._samples), strict=True)
        generated = greedy(engine, list(prompts), self._max_new_tokens, self._stop_tokens, images)
        entries = [
            {
                "prompt": self._tokenizer.decode(sample.prompt),
                "generated": self._tokenizer.decode(new),
                "answer": self._tokenizer.decode(sample.answer),
            }
            for sample, new in zip(self._samples, generated, strict=True)
        ]
        with self._file.open("ab") as file:
            file.write(orjson.dumps({"step": step, "data": {"samples": entries}}) + b"\n")
        for number, entry in enumerate(entries, start=1):
            print(f"sample {number} at step {step}: {_shown(entry['prompt'])}")
            print(f"  generated: {_shown(entry['generated'])}\n  data:      {_shown(entry['answer'])}")
        self._logger.log(self._trackers, [_scored(entry) for entry in entries], step)


def _shown(text: str) -> str:
    return json.dumps(text if len(text) <= SHOWN else f"{text[:SHOWN]} ...", ensure_ascii=False)


def _scored(entry: dict[str, str]) -> list[Any]:
    """verl's trackers show input, output and a score: 1 where the answer is the data's."""
    return [entry["prompt"], entry["generated"], float(entry["generated"] == entry["answer"])]
