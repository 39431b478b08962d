"""verl 0.9.1: a vLLM process that fails ends the run; without this the trainer may wait for it for ever.

Reason: the trainer sends weights through a socket and waits for each answer without a limit, and looks only afterwards
at the call by which vLLM receives them. And vLLM never completes the calls that were under way to its engine process
when that died; the replica that made them waits on.

Patched: in the rollout server the calls to the engine process raise when the process has died. In the trainer the
weight sender's socket gives up when the receiving call has ended, and raises what it raised.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from verl_patches.guard import check_source, first_time
from verl_patches.import_hook import after_import

SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server"
ADAPTER = "verl.workers.rollout.vllm_rollout.vllm_rollout"
SENDER = "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer"
SOURCES = {
    SERVER: {
        "collective_rpc": "25f008554b63f688",
        "wake_up": "18e81e986f58e3dc",
        "sleep": "b64e1a53eaa40e5f",
        "clear_kv_cache": "02a38d8b841948d4",
    },
    ADAPTER: {"_execute_method": "051661db69e635d0", "update_weights": "2d5536219ed168c7"},
    SENDER: {
        "_init_socket": "23603b065142595b",
        "_init_buffer": "da10d5281fb76e51",
        "async_send_weights": "8dcca4e0c86155f3",
        "_direct_send_large_weight": "4e147bbdd6be0888",
    },
}
RECEIVES = "update_weights_from_ipc"
POLL_SECONDS = 1.0

# The call to the rollout that receives what this task sends; a Ray object reference.
receiving_call: ContextVar[Any] = ContextVar("receiving_call", default=None)


def apply() -> None:
    """Patch verl's vLLM rollout, now or when its modules are imported."""
    after_import(SERVER, _patch_server)
    after_import(ADAPTER, _patch_adapter)
    after_import(SENDER, _patch_sender)


def _patch_server(module: ModuleType) -> None:
    server = module.vLLMHttpServer
    if first_time("rollout_failure", server):
        check_source("rollout_failure", server, SOURCES[SERVER])
        for name in SOURCES[SERVER]:
            setattr(server, name, _ends_with_engine(name, getattr(server, name)))


def _ends_with_engine(name: str, method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(method)
    async def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = asyncio.ensure_future(method(self, *args, **kwargs))
        try:
            while not (await asyncio.wait({call}, timeout=POLL_SECONDS))[0]:
                if self.engine.errored:
                    replica = self.replica_rank
                    raise RuntimeError(f"the vLLM engine process of rollout replica {replica} died during {name}")
            return call.result()
        finally:
            call.cancel()  # nothing if it has ended; `asyncio.wait` would let it go on when this is cancelled

    return wrapper


def _patch_adapter(module: ModuleType) -> None:
    adapter = module.ServerAdapter
    if not first_time("rollout_failure", adapter):
        return
    check_source("rollout_failure", adapter, SOURCES[ADAPTER])
    execute_method = adapter._execute_method

    @functools.wraps(execute_method)
    async def _execute_method(self: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        result = await execute_method(self, method, *args, **kwargs)
        if method == RECEIVES:
            receiving_call.set(result)
        return result

    adapter._execute_method = _execute_method


def _patch_sender(module: ModuleType) -> None:
    sender = module.BucketedWeightSender
    if not first_time("rollout_failure", sender):
        return
    check_source("rollout_failure", sender, SOURCES[SENDER])
    init_socket = sender._init_socket

    @functools.wraps(init_socket)
    def _init_socket(self: Any) -> None:
        init_socket(self)
        self.socket = AnsweredSocket(self.socket, receiving_call.get())

    sender._init_socket = _init_socket


class AnsweredSocket:
    """A ZeroMQ request socket that waits for its peer only while the peer's own call goes on.

    Args:
        socket: verl's.
        call: Ray reference of the call that receives; None (a rank that sends to no server of its own) is not watched.
    """

    def __init__(self, socket: Any, call: Any) -> None:
        self._socket, self._call = socket, call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def send_pyobj(self, content: object) -> None:
        """As pyzmq's; a peer that never connects would block it.

        Raises:
            RuntimeError: the receiving call has ended; or what that call raised.
        """
        self._wait(output=True)
        self._socket.send_pyobj(content)

    def recv(self) -> bytes:
        """As pyzmq's; raises as `send_pyobj`."""
        self._wait(output=False)
        return self._socket.recv()

    def _wait(self, *, output: bool) -> None:
        import ray
        import zmq

        while not self._socket.poll(1000 * POLL_SECONDS, zmq.POLLOUT if output else zmq.POLLIN):
            if self._call is None or not ray.wait([self._call], timeout=0)[0]:
                continue
            if self._socket.poll(1000 * POLL_SECONDS, zmq.POLLOUT if output else zmq.POLLIN):
                return  # the call ended with its last answer, which takes a way of its own and may come later
            self._socket.linger = 0  # what was sent has no taker: do not wait for one when the process ends
            ray.get(self._call)
            raise RuntimeError("the rollout ended the weight update before it had received all weights")
