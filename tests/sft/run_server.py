"""A process that has imported what a run needs and forks one child per run: `python -m tests.sft.run_server`

One JSON line per request on the standard input, one JSON line as the answer:

    {"argv": [...], "cwd": ..., "env": {...}, "log": ..., "before": null or [function, argument]}   -> {"pid": n}
    {"wait": pid, "seconds": n}                                                  -> {"status": n}, null: still running

`before` is called in the child, before the run: it may damage what a test wants damaged. A run ends with the server.
"""

import ctypes
import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
from typing import Any, NoReturn

import matplotlib.backends.backend_agg  # noqa: F401
import matplotlib.figure  # noqa: F401
import torch.utils.tensorboard  # noqa: F401
import transformers.models.qwen2.modeling_qwen2  # noqa: F401

import megatrain_verl.sft.trainer  # noqa: F401
import megatrain_verl.verl_backend.engine  # noqa: F401
from megatrain_verl.sft import __main__ as command

PR_SET_PDEATHSIG = 1


def start(request: dict[str, Any]) -> int:
    """Fork a run; returns its process id."""
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        _run(request)
    return pid


def _run(request: dict[str, Any]) -> NoReturn:
    status = 1
    try:
        log = os.open(request["log"], os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(log, 1), os.dup2(log, 2)
        os.chdir(request["cwd"])
        os.environ.update(request["env"])
        sys.argv = ["sft", *request["argv"]]
        sys.orig_argv = [sys.executable, "-m", "megatrain_verl.sft", *request["argv"]]
        if request["before"]:
            name, argument = request["before"]
            module, function = name.rsplit(".", 1)
            getattr(importlib.import_module(module), function)(argument)
        command.main()
        status = 0
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)


def wait(pid: int, seconds: float) -> int | None:
    """The exit status of `pid`, minus the signal that ended it; None if it still runs after `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    return None


def main() -> None:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    gc.collect(), gc.freeze()  # what has been imported is not garbage, and verl collects often
    for line in sys.stdin:
        request = json.loads(line)
        answer = {"status": wait(request["wait"], request["seconds"])} if "wait" in request else {"pid": start(request)}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
