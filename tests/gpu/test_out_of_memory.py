"""Really out of CUDA memory: the error says what fits, that fits, and the step is as if nothing had failed."""

import gc
import re

import pytest
import torch

from megatrain_verl.config import AdamWConfig
from megatrain_verl.streaming.host_memory import HostBuffer
from tests import oracle
from tests.gpu.test_engine_cuda import distance, medium_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
MIB = 1 << 20
ROW = 512


@pytest.fixture
def little_memory():
    """The process may take 1 GiB of the device beyond what it holds: of less, the allocator wastes too large a part."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 1024 * MIB) / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_micro_batch_that_does_not_fit_is_named_with_one_that_does(little_memory):
    config, model = medium_model("qwen2")
    settings = {"device": "cuda", "resident_layers": 0, "head_chunk_tokens": 256, "device_activation_gb": 0.0}
    # Gradients of key biases are rounding alone, of which a small eps would make whole steps.
    adamw = AdamWConfig(lr=1e-3, eps=1e-6)
    hit, control = (oracle.make_engine(model.cpu(), config, adamw, **settings) for _ in range(2))
    del model
    torch.cuda.empty_cache()
    rows = [row.repeat(ROW // 8) for row in oracle.random_rows([8] * 128)]

    def loss(index, scores):
        return -scores.log_probs.sum() / 1e4

    with pytest.raises(torch.OutOfMemoryError) as failed:
        hit.forward_backward(oracle.split_micro_batches(rows, len(rows)), loss)
    (note,) = failed.value.__notes__
    print(note)
    del failed  # the error's frames hold what the pass had on the device
    gc.collect()
    hit.release_device()
    found = re.search(r"at most about (\d+) tokens per micro-batch instead of 65536", note)
    assert found and torch.cuda.memory_allocated() < 64 * MIB and hit.step_count == 0
    size = int(found[1]) // ROW
    assert size >= 2
    for engine in (hit, control):
        engine.forward_backward(oracle.split_micro_batches(rows[:size], size), loss)
        engine.optimizer_step()
        engine.release_device()
    kept, expected = oracle.masters(hit), oracle.masters(control)
    assert distance(kept, expected) < 1e-5  # attention's backward pass on CUDA does not repeat its bits
    hit.close(), control.close()


def test_a_buffer_that_nobody_closed_is_unlocked_when_it_goes():
    """Else CUDA takes the next one at its address for the one before, error 712."""
    addresses = []
    for _ in range(3):
        block = HostBuffer(64 * MIB, "a test", register=True)
        addresses.append(block.tensor.data_ptr())
        del block
    assert len(set(addresses)) < 3
