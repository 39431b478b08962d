"""The timeline of one step: the CUDA streams by the profiler, the optimizer thread by its own clock.

`record` writes a Chrome trace (ui.perfetto.dev opens it) and beside it a picture. `python timeline.py TRACE PNG` draws
one again.
"""

import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from megatrain_verl.streaming.streams import LANES, DeviceStreams, ThreadQueue

GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
LANE_ROWS = tuple(f"AdamW lane {index}" for index in range(LANES))
ROWS = ("weight stream", "compute stream", "grad stream", *LANE_ROWS, "optimizer thread")
CLOCK = "clock of the host"


class SpanRecorder:
    """Notes (name, start, end) in ns of every piece of work that is put into a host queue while it is entered."""

    def __init__(self, queue: ThreadQueue) -> None:
        self._queue, self._run = queue, queue.run
        self.spans: list[tuple[str, int, int]] = []

    def __enter__(self) -> "SpanRecorder":
        self._queue.run = lambda work: self._run(partial(self._timed, work))
        return self

    def __exit__(self, *_: object) -> None:
        self._queue.run = self._run

    def _timed(self, work: Callable[[], None]) -> None:
        start = time.time_ns()
        work()
        self.spans.append((_unit_name(work), start, time.time_ns()))


def record(path: Path, streams: DeviceStreams, step: Callable[[], object], finish: Callable[[], object]) -> None:
    """Write the timeline of the second of two steps to `path` (JSON) and a picture of it with the suffix .png.

    Args:
        step: runs one step; its AdamW goes on when it returns.
        finish: waits for that.
    """
    cuda = torch.cuda.is_available()
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * cuda
    with SpanRecorder(streams.optimizer) as optimizer, torch.profiler.profile(activities=activities) as profiler:
        step()  # its AdamW is what runs when the next step begins
        start = time.time_ns()
        with torch.profiler.record_function(CLOCK):
            step()
        finish()
        end = time.time_ns()
    with tempfile.TemporaryDirectory() as folder:
        exported = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(exported))
        events = json.loads(exported.read_text())["traceEvents"]
    # The trace counts microseconds from its own zero, the spans nanoseconds since 1970; one event is in both.
    zero = start / 1e3 - next(
        event["ts"] for event in events if event["name"] == CLOCK and event.get("cat") == "user_annotation"
    )
    window = (start / 1e3 - zero, end / 1e3 - zero)
    spans = device_spans(events)
    spans += [("optimizer thread", name, a / 1e3 - zero, (b - a) / 1e3) for name, a, b in optimizer.spans]
    spans = [span for span in spans if span[2] + span[3] > window[0] and span[2] < window[1]]
    path.write_text(json.dumps(chrome_trace(spans, window[0])))
    draw(path, path.with_suffix(".png"))


def device_spans(events: list[dict]) -> list[tuple[str, str, float, float]]:
    """(row, name, start, duration) in microseconds of everything that ran on the device.

    Streams are told apart by what they did: the compute stream has most kernel time, the weight stream copies to the
    device only, the gradient stream to the host only, and the lanes of AdamW both ways. Others keep their number.
    """
    ran = [event for event in events if event.get("cat") in GPU_CATEGORIES]
    kernels, sent, received = Counter(), Counter(), Counter()
    for event in ran:
        stream = event["args"]["stream"]
        if event["cat"] == "kernel":
            kernels[stream] += event["dur"]
        elif event["cat"] == "gpu_memcpy":
            sent[stream] += event["args"]["bytes"] if "HtoD" in event["name"] else 0
            received[stream] += event["args"]["bytes"] if "DtoH" in event["name"] else 0
    names = {stream: "compute stream" for stream, _ in kernels.most_common(1)}
    copying = [stream for stream in sorted(sent | received) if stream not in names]
    lanes = [stream for stream in copying if sent[stream] and received[stream]]
    names |= dict(zip(lanes, LANE_ROWS, strict=False))
    for row, copied in (("weight stream", sent), ("grad stream", received)):
        most = max((stream for stream in copying if stream not in names), key=copied.__getitem__, default=None)
        if most is not None and copied[most]:
            names[most] = row
    streams = [event["args"]["stream"] for event in ran]
    rows = [names.get(stream, f"stream {stream}") for stream in streams]
    return [(row, event["name"], event["ts"], event["dur"]) for row, event in zip(rows, ran, strict=True)]


def chrome_trace(spans: list[tuple[str, str, float, float]], zero: float) -> dict[str, object]:
    """The trace-event JSON of `spans`, one named row each, with time counted from `zero`."""
    rows = sorted({span[0] for span in spans}, key=lambda row: (row not in ROWS, ROWS.index(row) if row in ROWS else 0))
    events: list[dict] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": row}}
        for number, row in enumerate(rows)
    ]
    events += [
        {"ph": "X", "pid": 0, "tid": rows.index(row), "name": name, "ts": start - zero, "dur": duration}
        for row, name, start, duration in spans
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def draw(trace: Path, picture: Path) -> None:
    """A picture of a trace that `record` wrote: a line for each row, a bar wherever it is busy."""
    from matplotlib import pyplot

    events = json.loads(trace.read_text())["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    figure, axes = pyplot.subplots(figsize=(12, 0.6 * len(rows) + 1.2), layout="constrained")
    for tid in rows:
        bars = sorted((e["ts"] / 1e6, e["dur"] / 1e6) for e in events if e["ph"] == "X" and e["tid"] == tid)
        axes.broken_barh(bars, (len(rows) - 1 - tid - 0.4, 0.8), facecolors=f"C{tid}")
    axes.set_yticks(range(len(rows)), [rows[len(rows) - 1 - line] for line in range(len(rows))])
    axes.set_xlabel("seconds since the step began; AdamW of the step before it runs at first, its own at the end")
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)


def _unit_name(work: Callable[[], None]) -> str:
    """The unit that queued work is about: an argument of the partial that has a plan; else just AdamW."""
    for argument in getattr(work, "args", ()):
        if hasattr(argument, "plan"):
            return f"AdamW {argument.plan.name}"
    return "AdamW"


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
