"""AdamW of one step, unit by unit: where it runs, and how others wait for a unit and for no other.

An update runs on the host's cores. On CUDA the last part of each unit goes to the device meanwhile (`DeviceShare`).
With `speculative_adamw_gb` units are updated before the gradient norm is known (`Speculation`).
"""

from collections.abc import Callable
from functools import partial

from megatrain_verl.config import AdamWConfig
from megatrain_verl.streaming.device_adamw import DeviceShare
from megatrain_verl.streaming.group.group import Group
from megatrain_verl.streaming.host_adamw import HostAdamW
from megatrain_verl.streaming.host_store import UnitState
from megatrain_verl.streaming.optimizer_step import AdamWStep
from megatrain_verl.streaming.speculation import Speculation
from megatrain_verl.streaming.streams import Event, Streams


class UnitUpdates:
    """Starts the updates of all units and knows when each is done.

    Args:
        settings: of AdamW.
        adamw: the host's kernel.
        share: the device's part of each update; None leaves everything to the host.
        streams: the `optimizer` queue runs the updates.
        group: each of its ranks updates its own parts of the units, in the same order.
    """

    def __init__(
        self, settings: AdamWConfig, adamw: HostAdamW, share: DeviceShare | None, streams: Streams, group: Group
    ) -> None:
        self._settings, self._adamw, self._share, self._streams = settings, adamw, share, streams
        self._group = group
        self._numbers: dict[str, int] = {}  # unit -> number of its last update, of all units' since the start
        self._started = 0
        self._updated: dict[str, Event] = {}  # unit -> mark behind the host's part of its last update
        self._speculation = Speculation(group)
        for finished in (adamw.finished, streams.finished):
            group.follow(finished)

    def guess(self, lr: float | None, step: int) -> None:
        """From now on units may be updated ahead for the step of this number with `lr`; None drops what was."""
        self._speculation.start(None if lr is None else self._step(lr, 1.0, step))

    def ahead(self, unit: UnitState, landed: Event) -> None:
        """The gradient of `unit` is in its arena behind `landed`: update the unit ahead, if that is wanted."""
        update = self._speculation.update_of(unit, self._adamw)
        if update is not None:
            self._streams.optimizer.wait(landed, "gradient on the host before its update")
            self._start(unit, update, self._speculation.step)

    def start(self, units: list[UnitState], lr: float | None, grad_scale: float, number: int) -> None:
        """Start step `number` on all `units`, in this order, but for those frozen or updated ahead."""
        step = self._step(lr, grad_scale, number)
        updated = self._speculation.take(step)
        rest = [unit for unit in units if unit.grad is not None and unit.plan.name not in updated]
        for unit, following in zip(rest, [*rest[1:], None], strict=True):
            update = self._adamw.update if self._share is None else partial(self._share.update, following=following)
            self._start(unit, partial(update, unit, step), step)

    def wait(self, unit: UnitState, purpose: str) -> None:
        """Block until `unit` is updated, by every rank.

        Raises:
            RuntimeError: an update failed; names the unit.
        """
        if unit.plan.name not in self._updated:
            return
        reason = f"weights updated before {purpose}"
        self._streams.host_wait(self._updated[unit.plan.name], reason)
        if self._share is not None:
            for event in self._share.pending(unit):
                self._streams.host_wait(event, f"weights updated on the device before {purpose}")
        self._group.wait_updated(self._numbers[unit.plan.name], reason)

    def release_device(self) -> None:
        """Free what the updates use on the device. If the device takes part, waits for all that have been started."""
        if self._share is not None:
            try:
                self._streams.host_wait(self._streams.optimizer.record(), "AdamW started")
            finally:
                self._share.release()

    @property
    def device_bytes(self) -> int:
        """Bytes on the device."""
        return 0 if self._share is None else self._share.device_bytes

    def close(self) -> None:
        """Release the kernel's own state, after the queues have ended."""
        self._adamw.close()

    def _start(self, unit: UnitState, update: Callable[[], None], step: AdamWStep) -> None:
        self._streams.optimizer.run(partial(self._named_update, unit, update, step))
        self._started += 1
        self._numbers[unit.plan.name] = self._started
        self._updated[unit.plan.name] = self._streams.optimizer.record()

    def _step(self, lr: float | None, grad_scale: float, number: int) -> AdamWStep:
        settings = self._settings
        return AdamWStep(
            lr=settings.lr if lr is None else lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            step=number,
            grad_scale=grad_scale,
            decay_norms_and_biases=settings.decay_norms_and_biases,
        )

    def _named_update(self, unit: UnitState, update: Callable[[], None], step: AdamWStep) -> None:
        try:
            update()
            self._tell(unit)
        except Exception as error:
            self._group.fail(error)
            raise RuntimeError(f"AdamW of {unit.plan.name} failed in step {step.step}: {error}") from error

    def _tell(self, unit: UnitState) -> None:
        """The other ranks may use this rank's part of `unit`."""
        if self._group.size > 1:
            for event in self._share.pending(unit) if self._share is not None else []:
                event.synchronize()
            self._group.updated()
