"""The table of docs/models.md from the results of the tests: `python -m tests.models_table RESULTS.xml...`.

    python -m pytest tests/families tests/vision tests/test_hub_layout.py -m "not slow" --junitxml=RESULTS.xml
    python -m pytest tests/families/test_vllm.py tests/verl_backend/test_grpo_images.py -m slow --junitxml=VLLM.xml

Rows are the model types that the engine takes, cells the tests of it that passed, of those that ran.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from xml.etree import ElementTree

from megatrain_verl.streaming.model_plan import VERIFIED_MODEL_TYPES
from tests import config_headers
from tests.config_headers import ROOT
from tests.families.configs import FAMILIES

PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- written by tests/models_table.py -->\n", "<!-- end -->\n"
TESTED = ("alone", "packed", "images", "export", "vLLM", "images in GRPO")
COLUMNS = ("model type", "tested as", *TESTED, "SFT", "GRPO")
STEPS = "test_three_steps_equal_plain_adamw"
EXPORTS = (
    "test_names_and_shapes_are_those_that_transformers_saves",
    "test_saved_folders_load_both_ways_and_another_image_gives_another_score",
    "test_router_biases_stay_float32_and_are_exported_as_they_were_loaded",
)

VLLM = "test_vllm_generates_what_transformers_does"
GRPO_ON_IMAGES = "test_grpo_on_images"

Results = dict[tuple[str, str], list[bool]]  # model type, column -> passed?


def cases(path: str) -> Iterator[tuple[str, str, str, bool]]:
    """(module, function, parameters, passed?) of every test of a junit file that was not skipped."""
    for case in ElementTree.parse(path).iter("testcase"):
        if case.find("skipped") is None:
            name, _, _ = case.get("name").partition("@")  # pytest-xdist appends the group of a test
            function, _, parameters = name.partition("[")
            failed = case.find("failure") is not None or case.find("error") is not None
            yield case.get("classname"), function, parameters.rstrip("]"), not failed


def results(*paths: str) -> Results:
    """What the tests of all files say of each model type."""
    found: Results = defaultdict(list)
    for module, function, parameters, passed in chain.from_iterable(map(cases, paths)):
        name = next((name for name in FAMILIES if parameters in (name, f"{name}-1", f"{name}-3")), None)
        model_type, *size = parameters.split("-")  # of tests of images, and of checkpoint names
        if name is not None:
            model_type, size = FAMILIES[name][0], [parameters[-1]]
        if function == STEPS:
            column = "alone" if size[0] == "1" else "packed"
            found[model_type, column].append(passed)
            if ".vision." in module:
                found[model_type, "images"].append(passed)
        elif function in EXPORTS:
            found[model_type, "export"].append(passed)
        elif function == VLLM:
            found[model_type, "vLLM"].append(passed)
        elif function == GRPO_ON_IMAGES:
            found[model_type, "images in GRPO"].append(passed)
    return found


def configurations(kind: str) -> dict[str, list[str]]:
    """Model type -> its configurations in configs/sft or configs/rl."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in config_headers.config_files(kind):
        model_type = json.loads((config_headers.model_folder(path) / "config.json").read_text())["model_type"]
        found[model_type].append(path.stem)
    return found


def rows(found: Results) -> Iterator[list[str]]:
    """The cells of each model type."""
    sft, rl = configurations("sft"), configurations("rl")
    for model_type in VERIFIED_MODEL_TYPES:
        names = [name for name, (kind, _) in FAMILIES.items() if kind == model_type]
        cells = [f"`{model_type}`", ", ".join(names) or "its own tiny config"]
        for column in TESTED:
            passed = found.get((model_type, column), [])
            cells.append(f"{sum(passed)} of {len(passed)}" if passed else "-")
        yield [*cells, *(str(len(kind[model_type])) if model_type in kind else "-" for kind in (sft, rl))]


def table(*paths: str) -> str:
    """The table as Markdown."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows(results(*paths))]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def main() -> None:
    """Replace the table in the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + BEGIN + "\n" + table(*sys.argv[1:]) + "\n" + END + after)


if __name__ == "__main__":
    main()
