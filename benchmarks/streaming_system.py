"""The row of this project's engine."""

import statistics
import time
from pathlib import Path

import timeline
import torch
from peer_loop import HostMemory
from torch import Tensor
from workload import ADAMW, CLIP_GRAD, WARM_UP, Clock, Workload, draw_weight, shared_resident_bytes

from megatrain_verl.config import AdamWConfig, StreamingConfig
from megatrain_verl.streaming.batch import MicroBatch, TokenOutputs
from megatrain_verl.streaming.engine import StreamingEngine
from megatrain_verl.streaming.group.group import Group
from megatrain_verl.streaming.streams import DeviceStreams


class StreamingSystem:
    """The engine with the workload's start values.

    Steps follow each other as in training: AdamW of one runs under the next. In `measure`, two more steps wait for
    AdamW first, and the difference is what was not hidden. The first loss marks the end of the forward pass.

    Args:
        options: fields of `StreamingConfig`.
        group: the ranks among which the rows of a step are divided.
    """

    def __init__(self, workload: Workload, micro_batch: int, options: dict[str, object], group: Group) -> None:
        self._workload, self._micro_batch = workload, micro_batch
        device = workload.device
        defaults = {"dtype": "bfloat16" if device == "cuda" else "float32", "compile_layers": device == "cuda"}
        self._config = StreamingConfig(**defaults | options)
        self._streams = DeviceStreams(device, group.wait_for)
        self.engine = StreamingEngine(
            workload.config,
            self._config,
            AdamWConfig(**ADAMW, clip_grad=CLIP_GRAD),
            device=device,
            streams=self._streams,
            group=group,
        )
        with group.by_first("the weights") as mine:
            # The values are bfloat16, so the low halves of split masters stay zero.
            for unit, span in self.engine.state.parameters() if mine else ():
                unit.view(unit.weight, span).copy_(draw_weight(span.name, span.shape, device))
        self._clock = Clock(device)
        self._steps = 0

    def measure(self, before: HostMemory) -> dict[str, object]:
        """The fields of `report.finish`."""
        cuda, counters = self._workload.device == "cuda", self.engine.counters
        for _ in range(WARM_UP):
            self._step()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        sent, received = counters.h2d_bytes, counters.d2h_bytes
        times = [self._step() for _ in range(self._workload.steps)]
        sent, received = counters.h2d_bytes - sent, counters.d2h_bytes - received
        peak = torch.cuda.max_memory_allocated() if cuda else 0
        seconds, forward, backward, losses = zip(*times, strict=True)
        adamw_alone = self._wait_for_adamw()
        waited = []
        for _ in range(2):
            waited.append(self._step()[0])
            adamw_alone = max(adamw_alone, self._wait_for_adamw())
        step = statistics.median(seconds)
        return {
            "step_s": step,
            "forward_s": statistics.median(forward),
            "backward_s": statistics.median(backward),
            "adamw_not_hidden_s": max(0.0, step - min(waited)),
            "step_without_adamw_s": min(waited),
            "adamw_alone_s": adamw_alone,
            "loss": losses[-1],
            "grad_norm": self.grad_norm,
            "micro_batch": self._micro_batch,
            "gpu_peak_bytes": peak,
            "host_bytes": self._host_bytes(before),
            "h2d_bytes": sent // self._workload.steps,
            "d2h_bytes": received // self._workload.steps,
            "adamw_backend": self.engine.adamw_backend,
            "settings": f"{self._config}, weights are read {self.engine.agreement.choice.how}",
        }

    def _host_bytes(self, before: HostMemory) -> int:
        """Growth of this process; of what ranks share, all is the first rank's."""
        group = self.engine.group
        if group.arenas is None:
            return before.process_growth()
        return before.process_growth() - shared_resident_bytes() + (group.arenas.nbytes if group.rank == 0 else 0)

    def trace(self, path: Path) -> None:
        """Write the timeline of one more step, with the AdamW of the step before it running as it begins."""
        timeline.record(path, self._streams, self._step, self._wait_for_adamw)

    def _step(self) -> tuple[float, float, float, float]:
        """(seconds, of them forward, of them backward, loss) without waiting for the AdamW of this step."""
        workload, clock = self._workload, self._clock
        group = self.engine.group
        rows = workload.batch(self._steps).tensor_split(group.size)[group.rank]
        batch = micro_batches(rows, self._micro_batch)
        self._steps += 1
        marks, losses = [], []

        def loss_fn(index: int, scores: TokenOutputs) -> Tensor:
            if index == 0:
                marks.append(clock.mark())
            losses.append(-scores.log_probs.sum() / workload.scored_tokens)
            return losses[-1]

        clock.synchronize()
        start, begin = time.perf_counter(), clock.mark()
        self.engine.zero_grad()
        self.engine.forward_backward(batch, loss_fn, next_lr=ADAMW["lr"])
        end = clock.mark()
        self.grad_norm = self.engine.optimizer_step()
        seconds = time.perf_counter() - start
        loss = sum(part.item() for part in losses)
        return seconds, clock.seconds(begin, marks[0]), clock.seconds(marks[0], end), loss

    def _wait_for_adamw(self) -> float:
        """Seconds until every unit is updated."""
        start = time.perf_counter()
        for _ in self.engine.named_weights():
            pass
        return time.perf_counter() - start


def micro_batches(ids: Tensor, rows: int) -> list[MicroBatch]:
    """(B, L) token ids without padding as micro-batches of `rows` rows."""
    length = ids.shape[1]
    return [
        MicroBatch(part.flatten(), torch.arange(length).repeat(len(part)), [length] * len(part))
        for part in ids.split(rows)
    ]
