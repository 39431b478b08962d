"""The table of model families counts what the tests' results say."""

from pathlib import Path

from tests.models_table import GRPO_ON_IMAGES, STEPS, TESTED, VLLM, results, rows

CASE = '<testcase classname="{module}" name="{name}">{outcome}</testcase>'
CASES = [
    ("tests.families.test_training", f"{STEPS}[Gemma-2-9B-1]", ""),
    ("tests.families.test_training", f"{STEPS}[Gemma-2-9B-3]", '<failure message="x"/>'),
    ("tests.families.test_training", f"{STEPS}[Phi-4-3]@test_training.py", ""),  # as named in parallel runs
    ("tests.families.test_training", f"{STEPS}[Phi-4-mini-3]", "<skipped/>"),
    ("tests.vision.test_parity", f"{STEPS}[gemma3-3-settings0]", ""),
    ("tests.test_hub_layout", "test_names_and_shapes_are_those_that_transformers_saves[gemma3]", ""),
    ("tests.families.test_vllm", f"{VLLM}[Gemma-2-9B]", ""),
    ("tests.families.test_vllm", f"{VLLM}[Phi-4]", "<skipped/>"),
    ("tests.verl_backend.test_grpo_images", f"{GRPO_ON_IMAGES}[qwen3_vl]", ""),
]


def test_cells_count_passed_tests_of_each_model_type(tmp_path: Path) -> None:
    file = tmp_path / "results.xml"
    cases = "".join(CASE.format(module=module, name=name, outcome=outcome) for module, name, outcome in CASES)
    file.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    cells = {row[0]: row[2 : 2 + len(TESTED)] for row in rows(results(str(file)))}
    assert cells["`gemma2`"] == ["1 of 1", "0 of 1", "-", "-", "1 of 1", "-"]
    assert cells["`phi3`"] == ["-", "1 of 1", "-", "-", "-", "-"]
    assert cells["`gemma3`"] == ["-", "1 of 1", "1 of 1", "1 of 1", "-", "-"]
    assert cells["`llama`"] == ["-", "-", "-", "-", "-", "-"]
    assert cells["`qwen3_vl`"] == ["-", "-", "-", "-", "-", "1 of 1"]
