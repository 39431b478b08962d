"""Greedy generation with vLLM in a process of its own: `python -m tests.families.vllm_generate PROMPTS.json FOLDER...`.

Prints a JSON object: folder -> for each prompt (token ids) the new token ids.
"""

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams

NEW_TOKENS = 8


def generate(folder: str, prompts: list[list[int]]) -> list[list[int]]:
    """The new tokens (NEW_TOKENS each) of the float32 model in `folder`."""
    llm = LLM(folder, dtype="float32", max_model_len=64, max_num_seqs=4, enforce_eager=True, skip_tokenizer_init=True)
    greedy = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy, use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    return [list(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    prompts = json.loads(Path(sys.argv[1]).read_text())
    print(json.dumps({folder: generate(folder, prompts) for folder in sys.argv[2:]}))
