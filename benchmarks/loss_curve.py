"""Losses of some steps on real text: the engine, plain AdamW with FP32 parameters, and plain AdamW in another order.

    python benchmarks/loss_curve.py --model DIR --text FILE --plot docs/images/loss_curve.png

Exits with 1 if the engine's loss differs from the plain one by more than the other order of the data makes, at most
over the steps.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from streaming_system import micro_batches
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from workload import ADAMW, CLIP_GRAD

from megatrain_verl.config import AdamWConfig, StreamingConfig
from megatrain_verl.streaming.batch import TokenOutputs
from megatrain_verl.streaming.engine import StreamingEngine


def main() -> None:
    """Train three times and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a checkpoint")
    parser.add_argument("--text", required=True, type=Path, help="JSON list of records of strings, or plain text")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="of the engine; default: bfloat16 on CUDA")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    dtype = arguments.dtype or ("bfloat16" if arguments.device == "cuda" else "float32")
    rows = text_rows(arguments)
    curves = {
        f"engine, {dtype}": engine_losses(arguments, batches(rows, arguments, seed=0), dtype),
        "plain, float32": plain_losses(arguments, batches(rows, arguments, seed=0)),
        "plain, float32, other order": plain_losses(arguments, batches(rows, arguments, seed=1)),
    }
    engine, plain, other = (torch.tensor(losses) for losses in curves.values())
    ours, order = ((curve - plain).abs().max().item() for curve in (engine, other))
    print(
        f"largest difference of {arguments.steps} losses to the plain run: engine {ours:.2e}, other order {order:.2e}"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(curves))
    if arguments.plot:
        draw(curves, arguments.plot)
    if ours > order:
        raise SystemExit("the engine differs by more than the order of the data does")


def text_rows(arguments: argparse.Namespace) -> Tensor:
    """(N, seq_len) int64: the text's tokens, an end-of-text token behind each record, cut into rows."""
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    text = arguments.text.read_text()
    records = [" ".join(filter(None, record.values())) for record in json.loads(text)] if text[0] == "[" else [text]
    ids = [token for record in records for token in [*tokenizer(record)["input_ids"], tokenizer.eos_token_id]]
    count, needed = len(ids) // arguments.seq_len, arguments.steps * arguments.rows
    if count < needed:
        raise ValueError(f"{arguments.text} has {count} rows of {arguments.seq_len} tokens; {needed} are needed")
    return torch.tensor(ids[: count * arguments.seq_len]).view(count, arguments.seq_len)


def batches(rows: Tensor, arguments: argparse.Namespace, seed: int) -> Iterator[Tensor]:
    """(rows, seq_len) for each step: the same rows in the order of `seed`."""
    used = rows[: arguments.steps * arguments.rows]
    order = torch.randperm(len(used), generator=torch.Generator().manual_seed(seed))
    yield from used[order].split(arguments.rows)


def plain_losses(arguments: argparse.Namespace, data: Iterator[Tensor]) -> list[float]:
    """Loss of every step of torch.optim.AdamW on a float32 transformers model."""
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).to(arguments.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    losses = []
    for ids in data:
        ids = ids.to(arguments.device)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def engine_losses(arguments: argparse.Namespace, data: Iterator[Tensor], dtype: str) -> list[float]:
    """Loss of every step of the streaming engine, two micro-batches each."""
    config, adamw = AutoConfig.from_pretrained(arguments.model), AdamWConfig(**ADAMW, clip_grad=CLIP_GRAD)
    engine = StreamingEngine(config, StreamingConfig(dtype=dtype), adamw, device=arguments.device)
    engine.load_weights(arguments.model)
    scored = arguments.rows * (arguments.seq_len - 1)  # the last token of a row has no next one

    def loss_fn(_: int, scores: TokenOutputs) -> Tensor:
        return -scores.log_probs.sum() / scored

    losses = []
    for ids in data:
        engine.zero_grad()
        outputs = engine.forward_backward(micro_batches(ids, max(1, arguments.rows // 2)), loss_fn)
        engine.optimizer_step()
        losses.append(-sum(scores.log_probs.sum().item() for scores in outputs) / scored)
    engine.close()
    return losses


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """The three curves, and below them the differences to the plain one."""
    from matplotlib import pyplot

    plain = torch.tensor(curves["plain, float32"])
    figure, (above, below) = pyplot.subplots(2, figsize=(8, 6), sharex=True, layout="constrained")
    for index, (name, losses) in enumerate(curves.items()):
        look = {"label": name, "color": f"C{index}", "linestyle": ("-", "--", ":")[index]}
        above.plot(losses, **look)
        if losses is not curves["plain, float32"]:
            below.semilogy((torch.tensor(losses) - plain).abs(), **look)
    above.set_ylabel("loss")
    below.set_ylabel("difference to plain, float32")
    below.set_xlabel("step")
    figure.legend(*above.get_legend_handles_labels(), loc="outside upper center", ncols=len(curves))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    main()
