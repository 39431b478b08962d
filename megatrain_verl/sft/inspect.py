"""`python -m megatrain_verl.sft.inspect DATASET --model M`: what of a data set is trained, masked and dropped.

    python -m megatrain_verl.sft.inspect NAME --model MODEL data.dataset_dir=FOLDER data.max_length=512

takes the overrides of a training run and shows its rows: trained text green, the rest dim (without colours, trained
text stands between ⟦ and ⟧), then dropped rows by reason and how long the rows are.
"""

import argparse
import itertools
import os
import sys
from collections.abc import Iterator
from typing import TextIO

import hydra
import numpy as np
from hydra.errors import HydraException
from omegaconf import DictConfig, open_dict
from omegaconf.errors import OmegaConfBaseException
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase, ProcessorMixin

from megatrain_verl.sft import options, search_path
from megatrain_verl.sft.chat_template import Encoded
from megatrain_verl.sft.dataset import folder_of, row_settings
from megatrain_verl.sft.encoding import Report, usable_rows
from megatrain_verl.sft.image_template import processor_of
from megatrain_verl.sft.registry import find_datasets
from megatrain_verl.verl_backend.processors import load_processor

TRAINED, MASKED, RESET = "\033[32m", "\033[2m", "\033[0m"
PERCENTILES = (0, 5, 50, 95, 100)
# Would steer the terminal; tab and newline stay.
NOT_SHOWN = {code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), *range(127, 160))}


def main(arguments: list[str] | None = None) -> None:
    """Print the rows that the command line asks for; what is wrong with options or data ends it with one line."""
    parser = argparse.ArgumentParser(
        prog="python -m megatrain_verl.sft.inspect", description="Show what of a data set is trained, masked, dropped."
    )
    parser.add_argument("dataset", help="names in dataset_info.json, separated by commas")
    parser.add_argument("overrides", nargs="*", help="options of the training run, such as data.dataset_dir=FOLDER")
    parser.add_argument("--model", required=True, help="folder or hub name of the model, for its tokenizer")
    parser.add_argument("--rows", type=int, default=3, help="rows to show (3)")
    given = parser.parse_intermixed_args(arguments)
    try:
        config = _config(given)
        tokenizer, processor = _tokenizer(config.model), _processor(config.model)
        for name in options.names(config.data.dataset):
            show(name, tokenizer, config.data, given.rows, sys.stdout, processor)
    except (ValueError, OSError, HydraException, OmegaConfBaseException) as error:
        sys.exit(f"error: {error}")


def show(
    name: str | dict,
    tokenizer: PreTrainedTokenizerBase,
    data: DictConfig,
    rows: int,
    output: TextIO,
    processor: ProcessorMixin | None = None,
) -> None:
    """Write the first `rows` usable rows of data set `name`, and figures of all, to `output`.

    Raises:
        ValueError: names the file, row or option that is wrong; or no row is usable.
    """
    (entry,) = find_datasets([name], folder_of(data))
    settings, report = row_settings(data), Report(entry)
    template = settings.template(tokenizer, processor_of(entry.name, "images" in entry.columns, tokenizer, processor))
    usable = usable_rows(entry, template, settings, report)
    colour = output.isatty() and not os.environ.get("NO_COLOR")
    lengths: list[tuple[int, int]] = []
    for number, encoded in enumerate(usable, start=1):
        lengths.append((len(encoded.input_ids), sum(encoded.loss_mask)))
        if number <= rows:
            print(f"--- usable row {number}: {lengths[-1][0]} tokens, {lengths[-1][1]} trained", file=output)
            print(marked(encoded, tokenizer, colour=colour), file=output)
    report.check_some_left()
    print("---", file=output)
    report.print(output)
    for what, counts in zip(("tokens", "trained tokens"), np.array(lengths).T, strict=True):
        values = np.percentile(counts, PERCENTILES, method="nearest")
        figures = ", ".join(f"{percent}%: {value}" for percent, value in zip(PERCENTILES, values, strict=True))
        print(f"{what} per row, percentiles: {figures}", file=output)


def marked(encoded: Encoded, tokenizer: PreTrainedTokenizerBase, *, colour: bool) -> str:
    """The text of a row with what is trained set apart; control characters are written out."""
    pieces = []
    for trained, text in _pieces(encoded, tokenizer):
        text = text.translate(NOT_SHOWN)
        if colour:
            pieces.append(f"{TRAINED if trained else MASKED}{text}{RESET}")
        else:
            pieces.append(f"⟦{text}⟧" if trained else text)
    return "".join(pieces)


def _pieces(encoded: Encoded, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[bool, str]]:
    pairs = zip(encoded.loss_mask, encoded.input_ids, strict=True)
    for trained, group in itertools.groupby(pairs, key=lambda pair: pair[0]):
        yield bool(trained), tokenizer.decode([token for _, token in group])


def _config(given: argparse.Namespace) -> DictConfig:
    search_path.register()
    with hydra.initialize(config_path="conf", version_base=None):
        config = hydra.compose("megatrain_sft", given.overrides)
    with open_dict(config):
        config.model.path = given.model
        config.data.dataset = given.dataset
    return config


def _tokenizer(model: DictConfig) -> PreTrainedTokenizerBase:
    path = os.path.expanduser(model.tokenizer_path or model.path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"no tokenizer in {path}: {error}") from error
    if model.custom_chat_template:
        tokenizer.chat_template = model.custom_chat_template
    return tokenizer


def _processor(model: DictConfig) -> ProcessorMixin | None:
    path = os.path.expanduser(model.path)
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError):  # a folder with a tokenizer only
        return None
    return load_processor(path, config, model.custom_chat_template)


if __name__ == "__main__":
    main()
