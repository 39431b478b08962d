"""How fast several GPUs of one host get the same weights: each reads all of them, or its part, and sends it on.

    python benchmarks/shared_reads.py --devices 0,1

`full`: each GPU copies the whole unit from page-locked host memory. `once`: each copies 1/W of it, and from there to
the other GPUs. The engine reads in full, unless `TOGETHER` in read_choice.py says otherwise. Both alone and beside
AdamW on all cores, which needs the same memory. GB/s is that at which each GPU gets weights. One process drives all
GPUs; the copies are those of several.
"""

import argparse
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from ceilings import ADAM_PARAMETERS, adamw_unit

from megatrain_verl.streaming.host_adamw import HostAdamW
from megatrain_verl.streaming.host_memory import HostBuffer
from megatrain_verl.streaming.optimizer_step import AdamWStep

UNIT_BYTES = 466 << 20  # of a 7B layer in bfloat16
CHUNK_BYTES = 16 << 20  # what is sent on at a time
Read = Callable[[int], None]  # starts the reads of one GPU of a whole unit


class Readers:
    """One unit in host memory, and for each of `devices` a buffer and the streams that fill it."""

    def __init__(self, devices: list[str], nbytes: int) -> None:
        self.devices, self._cuda = devices, devices[0] != "cpu"
        self._host = HostBuffer(nbytes, "the unit", register=self._cuda)
        self._host.tensor.random_(generator=torch.Generator().manual_seed(0))
        self.buffers = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for device in devices]
        make = torch.cuda.Stream if self._cuda else lambda device: None
        self._down, self._across = ([make(device) for device in devices] for _ in range(2))

    def full(self, rank: int) -> None:
        """The whole unit from the host."""
        with self._on(self._down[rank]):
            self.buffers[rank].copy_(self._host.tensor, non_blocking=True)

    def once(self, rank: int) -> None:
        """One part of it from the host, and on to the others in chunks while the next one arrives."""
        share = len(self._host.tensor) // len(self.devices)
        for start in range(rank * share, (rank + 1) * share, CHUNK_BYTES):
            part = slice(start, min(start + CHUNK_BYTES, (rank + 1) * share))
            with self._on(self._down[rank]):
                self.buffers[rank][part].copy_(self._host.tensor[part], non_blocking=True)
            if self._cuda:
                self._across[rank].wait_stream(self._down[rank])
            with self._on(self._across[rank]):
                for other in range(1, len(self.devices)):
                    target = self.buffers[(rank + other) % len(self.devices)]
                    target[part].copy_(self.buffers[rank][part], non_blocking=True)

    def check(self, read: Read) -> None:
        """Raise if any device does not get every byte of the unit."""
        for buffer in self.buffers:
            buffer.zero_()
        self._run(read, 1)
        if not all(torch.equal(buffer.cpu(), self._host.tensor) for buffer in self.buffers):
            raise RuntimeError(f"copies of '{read.__name__}' lose data on this host")

    def rate(self, read: Read, repeats: int) -> float:
        """Bytes/s at which each device gets the unit, all of them at once."""
        start = time.perf_counter()
        self._run(read, repeats)
        return repeats * len(self._host.tensor) / (time.perf_counter() - start)

    def close(self) -> None:
        """Release the unit."""
        self._host.close()

    def _run(self, read: Read, repeats: int) -> None:
        def work(rank: int) -> None:
            for _ in range(repeats):
                read(rank)

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(self.devices))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for device in self.devices if self._cuda else []:
            torch.cuda.synchronize(device)

    def _on(self, stream: "torch.cuda.Stream | None") -> AbstractContextManager[None]:
        return torch.cuda.stream(stream) if self._cuda else nullcontext()


class AdamWLoad:
    """AdamW of all cores, over and over."""

    def __init__(self, parameters: int) -> None:
        self._unit, self._adamw = adamw_unit(parameters), HostAdamW("native")

    @contextmanager
    def running(self) -> Iterator[Callable[[], float]]:
        """Inside, AdamW runs; what is yielded says at how many parameters/s it did, once it has ended."""
        end, updates, start = threading.Event(), [0], time.perf_counter()

        def work() -> None:
            while not end.is_set():
                self._adamw.update(self._unit, AdamWStep(1e-3, (0.9, 0.999), 1e-8, 0.1, updates[0] + 1, 0.5, True))
                updates[0] += 1

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield lambda: updates[0] * self._unit.plan.numel / seconds
        finally:
            end.set()
            thread.join()
            seconds = time.perf_counter() - start


def main() -> None:
    """Print a row for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="0,1", help="numbers of CUDA devices, or cpu,cpu to try it out")
    parser.add_argument("--repeats", type=int, default=200, help="reads of the unit in each measurement")
    parser.add_argument("--unit-mb", type=int, default=UNIT_BYTES >> 20, help="MiB of the unit")
    arguments = parser.parse_args()
    devices = [name if name == "cpu" else f"cuda:{name}" for name in arguments.devices.split(",")]
    nbytes = (arguments.unit_mb << 20) // len(devices) * len(devices)
    readers = Readers(devices, nbytes)
    load = AdamWLoad(ADAM_PARAMETERS if devices[0] != "cpu" else ADAM_PARAMETERS // 100)
    with load.running() as alone:
        time.sleep(2)
    print(f"AdamW alone {alone() / 1e9:.2f}e9 parameters/s")
    print("| each GPU reads | GB/s per GPU | beside AdamW | AdamW then, 1e9 parameters/s |")
    print("|---|---|---|---|")
    ways = (readers.full, readers.once)
    for way in ways:
        readers.check(way)
    for read in ways * 2:  # twice: how far two measurements differ
        quiet = readers.rate(read, arguments.repeats)
        with load.running() as adamw:
            busy = readers.rate(read, arguments.repeats)
        print(f"| {read.__name__} | {quiet / 1e9:.1f} | {busy / 1e9:.1f} | {adamw() / 1e9:.2f} |", flush=True)
    readers.close()


if __name__ == "__main__":
    main()
