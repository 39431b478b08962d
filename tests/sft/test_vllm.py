"""vLLM loads what a run has written, and answers as transformers does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.sft.runs import RunServer, make_inputs

SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    model = LLM(sys.argv[1], dtype="float32", max_model_len=128, enforce_eager=True, max_num_seqs=4)
    prompts = [[{"role": "user", "content": f"Say {letter}"}] for letter in "abcd"]
    answers = model.chat(prompts, SamplingParams(temperature=0, max_tokens=8))
    found = [[list(answer.prompt_token_ids), list(answer.outputs[0].token_ids)] for answer in answers]
    print("ANSWERS", json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(900)
def test_vllm_loads_the_saved_model_and_answers_as_transformers(tmp_path: Path, server: RunServer) -> None:
    run = server.train(make_inputs(tmp_path))
    assert run.status == 0, run.printed[-3000:]
    saved = tmp_path / "out" / "global_step_10" / "huggingface"
    (tmp_path / "ask.py").write_text(SCRIPT)
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    asked = subprocess.run(
        [sys.executable, "ask.py", saved],
        env={**os.environ, **settings},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert asked.returncode == 0, asked.stderr[-3000:]
    answers = json.loads(asked.stdout.split("ANSWERS ", 1)[1].splitlines()[0])
    model, tokenizer = AutoModelForCausalLM.from_pretrained(saved), AutoTokenizer.from_pretrained(saved)
    for letter, (prompt, answer) in zip("abcd", answers, strict=True):
        message = [{"role": "user", "content": f"Say {letter}"}]
        inputs = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        assert prompt == inputs["input_ids"][0].tolist()
        generated = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, len(prompt) :]
        assert answer == generated.tolist()
