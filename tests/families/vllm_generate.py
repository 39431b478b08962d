"""Greedy generation with vLLM in a process of its own: `python -m tests.families.vllm_generate PROMPTS.json FOLDER...`.

Prints a line of JSON per folder: its name and either the new token ids of each prompt (of token ids) or, where vLLM
cannot run the model, its exception.
"""

import gc
import json
import sys
import traceback
from pathlib import Path

from vllm import LLM, SamplingParams

NEW_TOKENS = 8


def generate(folder: str, prompts: list[list[int]]) -> list[list[int]]:
    """The new tokens (NEW_TOKENS each) of the float32 model in `folder`."""
    llm = LLM(
        folder,
        dtype="float32",
        max_model_len=64,
        max_num_seqs=4,
        enforce_eager=True,
        skip_tokenizer_init=True,
        # Of Llama 4: vLLM ignores config.json in this, and has it off for rows of less than 32,768 tokens.
        override_generation_config={"attn_temperature_tuning": True},
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy, use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    return [list(output.outputs[0].token_ids) for output in outputs]


def main() -> None:
    """One folder after the other; an exception is part of what is printed, since tests expect some."""
    prompts = json.loads(Path(sys.argv[1]).read_text())
    for folder in sys.argv[2:]:
        try:
            result = {"tokens": generate(folder, prompts)}
        except Exception as error:
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"folder": folder, **result}), flush=True)
        gc.collect()


if __name__ == "__main__":
    main()
