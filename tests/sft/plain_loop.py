"""The plain training loop that SFT must equal, and the golden file with what it gave.

    python -m tests.sft.plain_loop outputs/models/SmolLM2-135M-Instruct     # writes tests/sft/golden_smollm2_135m.json

transformers and torch.optim.AdamW in float32 and nothing of this package: rows, masks, loss and norm are computed here.
The model comes from `python examples/quickstart/make_model.py outputs/models/SmolLM2-135M-Instruct`.
"""

import argparse
import json
import platform
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from torch import Tensor
from torch.utils.data import DistributedSampler
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

GOLDEN = Path(__file__).with_name("golden_smollm2_135m.json")
STEPS, BATCH, LR = 100, 2, 1e-5
# verl's defaults
BETAS, WEIGHT_DECAY, CLIP_GRAD = (0.9, 0.999), 0.01, 1.0


def rows() -> list[dict[str, str]]:
    """81 sums with answers of different lengths, in the alpaca format."""
    pairs = [(a, b) for a in range(1, 10) for b in range(3, 99, 11)]
    return [
        {"instruction": f"{a} + {b}", "output": f"{a} + {b} = {a + b}" if (a + b) % 2 else f"{a + b}"} for a, b in pairs
    ]


def tokenize(row: dict[str, str], tokenizer: PreTrainedTokenizerBase) -> tuple[Tensor, Tensor]:
    """(L,) token ids and (L,) mask of the trained ones: the answer and the token that ends its turn."""
    question = [{"role": "user", "content": row["instruction"]}]
    prompt = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    answer = [*question, {"role": "assistant", "content": row["output"]}]
    ids = tokenizer(tokenizer.apply_chat_template(answer, tokenize=False), return_tensors="pt").input_ids[0]
    start = len(tokenizer(prompt).input_ids)
    (ends,) = torch.where(ids == tokenizer.eos_token_id)
    positions = torch.arange(len(ids))
    return ids, (positions >= start) & (positions <= ends[-1])


def batches(tokenizer: PreTrainedTokenizerBase, steps: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Shuffled anew in each epoch by torch's sampler, as verl does; the rest of an epoch is dropped."""
    data = [tokenize(row, tokenizer) for row in rows()]
    sampler = DistributedSampler(data, num_replicas=1, rank=0, shuffle=True, drop_last=True)
    per_epoch = len(data) // BATCH
    for step in range(steps):
        epoch, number = divmod(step, per_epoch)
        sampler.set_epoch(epoch)
        yield [data[index] for index in list(sampler)[number * BATCH : (number + 1) * BATCH]]


def mean_loss(model: torch.nn.Module, batch: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Mean cross-entropy over the trained tokens of the batch."""
    ids = torch.nn.utils.rnn.pad_sequence([row for row, _ in batch], batch_first=True)
    trained = torch.nn.utils.rnn.pad_sequence([mask for _, mask in batch], batch_first=True)
    present = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row, _ in batch], batch_first=True)
    logits = model(ids, attention_mask=present).logits[:, :-1]
    log_probs = torch.log_softmax(logits, dim=-1).gather(2, ids[:, 1:, None]).squeeze(2)
    return -log_probs[trained[:, 1:]].sum() / trained[:, 1:].sum()


def train(folder: Path, steps: int) -> dict[str, list[float]]:
    """Loss and gradient norm before clipping of each step."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY)
    found: dict[str, list[float]] = {"loss": [], "grad_norm": []}
    for batch in batches(tokenizer, steps):
        optimizer.zero_grad()
        loss = mean_loss(model, batch)
        loss.backward()
        # In float64: torch's own sum of 135 million float32 squares is 3e-5 off.
        norm = sum(parameter.grad.double().square().sum() for parameter in model.parameters()).sqrt()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD)
        optimizer.step()
        found["loss"].append(loss.item())
        found["grad_norm"].append(norm.item())
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--output", type=Path, default=GOLDEN)
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    machine = {"cpu": torch.backends.cpu.get_cpu_capability(), "threads": torch.get_num_threads()}
    made = {"by": "python -m tests.sft.plain_loop", "python": platform.python_version(), **versions, **machine}
    golden = {"made": made, **train(arguments.model, arguments.steps)}
    arguments.output.write_text(json.dumps(golden, indent=1) + "\n")
