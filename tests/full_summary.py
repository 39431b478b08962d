"""Keep what a full test run ended with: `python full_summary.py LOG MARKDOWN`; nothing if pytest did not end."""

import platform
import re
import subprocess
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path

PACKAGES = ("torch", "transformers", "verl", "ray")


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
            *(f"    {line}".rstrip() for line in lines[starts[0] :]),
            "",
        ]
    )


if __name__ == "__main__":
    text = summary(Path(sys.argv[1]).read_text())
    if text is not None:
        Path(sys.argv[2]).write_text(text)
