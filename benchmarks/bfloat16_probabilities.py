"""How far bfloat16 alone moves the probabilities of a model's own answers: what rounding does to `rollout_probs_diff`.

    python benchmarks/bfloat16_probabilities.py --model FOLDER [--rows 64] [--device cuda]

Sums are answered by plain transformers in float32, on weights that both types hold, at temperature 1. Then each token's
probability is computed in bfloat16, by plain transformers and by the engine. Rollout and trainer are two such results:
where their errors are independent they differ by 1.4 times what is printed, on average.
"""

import argparse
import random
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from megatrain_verl.config import StreamingConfig
from megatrain_verl.streaming.batch import MicroBatch
from megatrain_verl.streaming.engine import StreamingEngine


def answers(model: PreTrainedModel, prompts: list[list[int]], length: int) -> list[tuple[Tensor, int]]:
    """For each prompt the row of prompt and sampled answer (T,) int64, and the length of the prompt."""
    rows = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)
        sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": length}
        rows.append((model.generate(ids, **sampling, pad_token_id=0)[0], len(prompt)))
    return rows


@torch.no_grad()
def plain_probabilities(model: PreTrainedModel, rows: list[tuple[Tensor, int]]) -> Tensor:
    """The probability of each token of the answers, (S,) float32 on the CPU."""
    found = []
    for row, start in rows:
        logits = model(row[None]).logits[0, start - 1 : -1].float()
        found.append(torch.log_softmax(logits, -1).gather(1, row[start:, None])[:, 0].exp())
    return torch.cat(found).cpu()


def engine_probabilities(folder: Path, model: PreTrainedModel, rows: list[tuple[Tensor, int]]) -> Tensor:
    """The same by the engine in bfloat16."""
    device = model.device.type
    engine = StreamingEngine(model.config, StreamingConfig(dtype="bfloat16"), None, device=device)
    engine.load_weights(folder)
    found = []
    for row, start in rows:
        (scores,) = engine.forward([MicroBatch(row.cpu(), torch.arange(len(row)), [len(row)])])
        found.append(scores.log_probs[start - 1 : len(row) - 1].exp().cpu())
    engine.close()
    return torch.cat(found)


def main() -> None:
    """Print a line for each of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a causal language model and its tokenizer")
    parser.add_argument("--rows", type=int, default=64, help="how many sums are answered")
    parser.add_argument("--length", type=int, default=24, help="tokens per answer at most")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    draw = random.Random(0)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    sums = [f"{draw.randrange(100)}+{draw.randrange(100)}=" for _ in range(arguments.rows)]
    prompts = [tokenizer(text)["input_ids"] for text in sums]
    load = {"dtype": torch.bfloat16, "attn_implementation": "sdpa"}
    exact, rounded = (
        AutoModelForCausalLM.from_pretrained(arguments.model, **load).eval().to(arguments.device) for _ in range(2)
    )
    exact.float()
    rows = answers(exact, prompts, arguments.length)
    expected = plain_probabilities(exact, rows)
    print(f"{len(expected)} tokens of {arguments.rows} answers; |p in bfloat16 - p in float32|:")
    results = {
        "plain transformers": plain_probabilities(rounded, rows),
        "the engine": engine_probabilities(arguments.model, exact, rows),
    }
    for name, found in results.items():
        error = (found - expected).abs()
        print(f"{name:20s} mean {error.mean():.2e}  largest {error.max():.2e}")


if __name__ == "__main__":
    main()
