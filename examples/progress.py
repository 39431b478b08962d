"""Show how a run of verl goes: `verl ... 2>&1 | python progress.py LOG` writes everything to LOG, and the steps here.

verl prints hundreds of lines at its start and one of 3,000 characters per step. Of each step this shows the bar and a
few metrics, and keeps the lines about checkpoints.
"""

import re
import sys
from pathlib import Path

BAR = re.compile(r"Training Progress: .*$")
STEP = re.compile(r"\bstep:(\d+) - (.*)")
METRIC = re.compile(r"(\S+):(?:np\.\w+\()?(-?\d[\d.]*(?:e[+-]?\d+)?|nan|-?inf)\b")
KEPT = re.compile(r"Saving checkpoint")
RAY_PREFIX = re.compile(r"^(\x1b\[\d+m)?\(\w+ pid=\d+\)(\x1b\[0m)? ")
METRICS = {  # name shown: how verl's name starts
    "loss": "train/loss",
    "reward": "critic/rewards/mean",
    "KL loss": "actor/kl_loss",
    "entropy": "actor/entropy",
    "gradient norm": ("actor/grad_norm", "train/grad_norm"),
    "rollout diff": "training/rollout_probs_diff_max",
    "held-out accuracy": "val-core/",
    "seconds": "timing_s/step",
}


def shown(line: str) -> str | None:
    """What is worth showing of one line of verl's output; None for nothing."""
    line = RAY_PREFIX.sub("", line.rstrip())
    if step := STEP.search(line):
        return describe(step.group(1), step.group(2))
    if bar := BAR.search(line):
        return bar.group().rpartition("Training Progress")[2].strip(": ")
    return line if KEPT.search(line) else None


def describe(step: str, metrics: str) -> str:
    """`step 3: reward 0.25, KL loss 0.001, ...` from verl's `name:value - name:value`."""
    values = dict(METRIC.findall(metrics))
    present = [
        f"{name} {float(value):.3g}"
        for name, start in METRICS.items()
        for key, value in values.items()
        if key.startswith(start)
    ]
    return f"step {step}: {', '.join(present)}"


def main(log: Path) -> None:
    """Copy standard input to `log` line by line, also what follows a carriage return."""
    sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]
    with log.open("a", buffering=1) as file:
        for line in sys.stdin:
            file.write(line)
            for part in line.split("\r"):
                if text := shown(part):
                    print(text, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
