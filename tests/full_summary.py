"""Keep what a full test run ended with: `python full_summary.py LOG MARKDOWN`; nothing if pytest did not end."""

import platform
import re
import subprocess
import sys
from collections import Counter
from datetime import date
from importlib.metadata import version
from pathlib import Path

PACKAGES = ("torch", "transformers", "verl", "ray")
SKIPPED = re.compile(r"SKIPPED \[(\d+)\] \S+: (.*)")  # how many tests, where, and why


def fold_skipped(lines: list[str]) -> list[str]:
    """One line per reason, in place of the first, for the skipped tests of all files; the other lines as they are."""
    matches = [SKIPPED.match(line) for line in lines]
    counts, folded = Counter[str](), []
    for skipped in filter(None, matches):
        counts[skipped[2]] += int(skipped[1])
    for line, skipped in zip(lines, matches, strict=True):
        if skipped is None:
            folded.append(line)
        elif count := counts.pop(skipped[2], 0):
            folded.append(f"SKIPPED [{count}] {skipped[2]}")
    return folded


def summary(log: str) -> str | None:
    """The slowest tests, the skipped and failed ones, and the counts, as Markdown; None if pytest did not end."""
    lines = log.splitlines()
    starts = [number for number, line in enumerate(lines) if re.match(r"=+ (slowest|short test summary)", line)]
    if not starts or not re.search(r"(passed|failed).* in [0-9.]+s", lines[-1]):
        return None
    describe = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True)
    python = platform.python_version()
    commit = describe.stdout.strip() or "no git checkout"
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    return "\n".join(
        [
            "# The last full test run",
            "",
            f"`bash tests/run.sh --full` of {commit} on {date.today()}, Python {python}, {versions}:",
            "",
            *(f"    {line}".rstrip() for line in fold_skipped(lines[starts[0] :])),
            "",
        ]
    )


if __name__ == "__main__":
    text = summary(Path(sys.argv[1]).read_text())
    if text is not None:
        page = Path(sys.argv[2])
        page.parent.mkdir(exist_ok=True)
        page.write_text(text)
