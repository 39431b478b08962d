"""The adapter between verl's workers and the streaming engine; registered as backend `megatrain`.

verl calls, for each mini-batch: train_mode() { optimizer_zero_grad, forward_backward_batch, optimizer_step },
lr_scheduler_step. All micro-batches of a mini-batch go to the streaming engine in one call.
"""

import copy
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.utils.metric import Metric
from verl.workers.config import HFModelConfig, OptimizerConfig
from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry
from verl.workers.engine.utils import (
    detach_tree,
    enable_full_determinism,
    postprocess_batch_func,
    prepare_micro_batches,
)

from megatrain_verl.streaming.batch import TokenOutputs
from megatrain_verl.streaming.engine import StreamingEngine
from megatrain_verl.verl_backend import process_env, ranks, registration
from megatrain_verl.verl_backend.checkpoint import CheckpointStore
from megatrain_verl.verl_backend.config import MegaTrainEngineConfig
from megatrain_verl.verl_backend.micro_batches import check_batch, to_micro_batch, to_model_output
from megatrain_verl.verl_backend.optimizer import LearningRate, adamw_config
from megatrain_verl.verl_backend.phases import PhaseLog

logger = logging.getLogger(__name__)

Loss = Callable[..., tuple[Tensor, dict[str, Any]]]


@EngineRegistry.register(model_type="language_model", backend="megatrain", device=["cuda", "cpu"])
class MegaTrainEngine(BaseEngine):
    """One device of this process, and all parameters in host memory, which the ranks of a run share.

    Raises:
        ValueError: adapters that are not supported, or options of another backend.
        RuntimeError: verl builds a separate reference although the actor is to be its own.
    """

    def __init__(
        self,
        model_config: HFModelConfig,
        engine_config: MegaTrainEngineConfig,
        optimizer_config: OptimizerConfig,
        checkpoint_config: CheckpointConfig,
    ) -> None:
        super().__init__()
        _check_engine_config(engine_config)
        self._lora = registration.lora_settings(model_config)
        self.model_config, self.engine_config = model_config, engine_config
        self.optimizer_config, self.checkpoint_config = optimizer_config, checkpoint_config
        self.mode: str | None = None
        self.streaming: StreamingEngine | None = None
        self.phases: PhaseLog | None = None
        self._scoring = "score_reference" if engine_config.forward_only else "score"
        self.learning_rate: LearningRate | None = None
        self.checkpoints = CheckpointStore(model_config, checkpoint_config)
        self.batches_without_labels = 0  # training batches so far whose every label is masked

    def initialize(self) -> None:
        """Load MODEL_PATH into host memory; nothing stays on the device, where the rollout starts next."""
        config = self.engine_config
        if config.full_determinism:
            enable_full_determinism(config.seed)
        if self.streaming is not None:
            self.streaming.close()
        group = ranks.meet()
        process_env.use_cores(config.cpu_threads or group.cores())
        trains = not config.forward_only
        # Refuses a schedule that does not fit the run, before the model is loaded.
        self.learning_rate = LearningRate(self.optimizer_config) if trains else None
        self.streaming = StreamingEngine(
            copy.deepcopy(self.model_config.hf_config),  # the engine sets its own attention there
            config.streaming_config(),
            adamw_config(self.optimizer_config) if trains else None,
            device=get_device_name(),
            keep_reference=trains and (config.ref_in_actor or self._lora is not None),
            group=group,
            lora=self._lora,
        )
        self.streaming.load_weights(self.model_config.local_path)
        self.phases = PhaseLog(self.streaming, config.trace_file)
        self.phases.released()
        role = "actor" if trains else "reference"
        logger.info("host memory of the megatrain %s:\n%s", role, self.streaming.host_plan.table())

    # ------------------------------------------------------------------------------------------------ device

    @property
    def is_param_offload_enabled(self) -> bool:
        return True

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        return True

    def train_mode(self, **kwargs: Any) -> "DeviceBuffers":
        """Context that holds the device buffers for training, and zeroes gradients when left."""
        return DeviceBuffers(self, "train", **kwargs)

    def eval_mode(self, **kwargs: Any) -> "DeviceBuffers":
        """Context that holds the device buffers for scoring."""
        return DeviceBuffers(self, "eval", **kwargs)

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Free all device memory ("cpu") or allocate the streaming buffers. Optimizer state never leaves the host."""
        super().to(device=device, model=model, optimizer=optimizer, grad=grad)
        if model and device == "cpu":
            self.release_device()
        elif model:
            self.streaming.acquire_device()

    def release_device(self) -> None:
        """Give all device memory back to the rollout."""
        self.streaming.release_device()
        self.phases.released()

    def release_passes(self) -> None:
        """Free what the passes used on the device. AdamW goes on there, under the weight transfer."""
        self.streaming.release_device(updates=False)

    # -------------------------------------------------------------------------------------------------- step

    def train_batch(self, data: TensorDict, loss_function: Loss) -> dict[str, Any]:
        """verl's: zero the gradients, add those of `data`, step. The last mini-batch of an RL update has the metrics
        of `PhaseLog` too.
        """
        outputs = super().train_batch(data, loss_function)
        if "responses" in data and tu.get_non_tensor_data(data, "update_lr_scheduler", True):
            outputs["metrics"] |= self.phases.metrics()
        return outputs

    def optimizer_zero_grad(self) -> None:
        self.streaming.zero_grad()

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Loss | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """Score `data` and, unless `forward_only`, add the gradient of the losses of its micro-batches.

        Losses are scaled as in verl's FSDP engine: by the `batch_num_tokens` of all ranks' mini-batches and by the
        number of ranks, then summed over micro-batches and averaged over ranks. Where every label is masked, loss and
        gradient are 0 (verl's own engines divide 0 by 0 there).

        Returns:
            dict with "model_output" (jagged tensors; empty in training unless asked for), "loss" (one float per
            micro-batch) and "metrics".
        """
        check_batch(data)
        labels, size = ranks.total(int(data["loss_mask"].sum().item())), self.get_data_parallel_size()
        if labels == 0 and not forward_only:
            self._count_batch_without_labels(len(data))
        tu.assign_non_tensor(data, sp_size=1, dp_size=size, batch_num_tokens=max(1, labels))
        micro_batches, indices = prepare_micro_batches(data, dp_group=self.get_data_parallel_group())
        packed = [to_micro_batch(micro_batch) for micro_batch in micro_batches]
        scores = {
            "entropy": tu.get_non_tensor_data(data, "calculate_entropy", False),
            "sum_pi_squared": tu.get_non_tensor_data(data, "calculate_sum_pi_squared", False),
        }
        reports: list[dict[str, Any]] = []

        def report(index: int, outputs: TokenOutputs) -> Tensor:
            loss, entry = self._loss(micro_batches[index], outputs, loss_function)
            reports.append(entry)
            return loss / size  # the engine adds the gradients of the ranks

        if forward_only:
            with self.phases.phase(self._scoring):
                outputs_of_all = self.streaming.forward(packed, **scores)
            for index, outputs in enumerate(outputs_of_all):
                report(index, outputs)
        else:
            with self.phases.phase("forward_backward"):
                self.streaming.forward_backward(packed, report, next_lr=self.learning_rate.value, **scores)
        keeps_outputs = forward_only or tu.get_non_tensor_data(data, "return_model_output", False)
        if labels == 0 and not forward_only and "responses" in data:
            reports[0]["metrics"]["actor/batches_without_labels"] = Metric("max", self.batches_without_labels)
        for entry in reports:
            entry["loss"] = entry["loss"].item()
            if not keeps_outputs:
                del entry["model_output"]
        return postprocess_batch_func(output_lst=reports, indices=indices, data=data)

    def _count_batch_without_labels(self, rows: int) -> None:
        self.batches_without_labels += 1
        logger.warning(
            "every label of a batch of %d rows is masked: its loss and gradient are 0 (%d such batches so far)",
            rows,
            self.batches_without_labels,
        )

    def _loss(
        self, micro_batch: TensorDict, outputs: TokenOutputs, loss_function: Loss | None
    ) -> tuple[Tensor, dict[str, Any]]:
        model_output = to_model_output(outputs, micro_batch["input_ids"])
        if loss_function is None:
            loss, metrics = torch.ones(()), {}
        else:
            loss, metrics = loss_function(
                model_output=model_output, data=micro_batch.to(get_device_id()), dp_group=self.get_data_parallel_group()
            )
        return loss, {"model_output": detach_tree(model_output), "loss": loss.detach(), "metrics": metrics}

    def optimizer_step(self) -> float:
        """Start AdamW; returns the gradient norm before clipping. Not finite: nothing changes."""
        with self.phases.phase("optimizer_step"):
            norm = self.streaming.optimizer_step(self.learning_rate.value)
        if not math.isfinite(norm):
            logger.warning("the gradient norm is %s: this step changes nothing", norm)
        return norm

    def lr_scheduler_step(self) -> float:
        """The learning rate of the next step."""
        return self.learning_rate.step()

    # ----------------------------------------------------------------------------------------------- weights

    def get_per_tensor_param(self, **_: Any) -> tuple[Iterator[tuple[str, Tensor]], None]:
        """The weights under their Hugging Face names, in the compute dtype, for the rollout; adapters are merged in.

        They are views of host memory, valid until the next optimizer step. verl copies each into its transfer buffer.
        """
        return self._export(), None

    def _export(self) -> Iterator[tuple[str, Tensor]]:
        bucket = self.engine_config.update_weights_bucket_megabytes << 20
        with self.phases.phase("export"):
            for name, weight in self.streaming.named_weights():
                self.phases.exported(weight.nbytes)
                # A tensor larger than the buffer is sent by its own CUDA handle, which a host tensor does not have.
                yield name, weight.to(get_device_id()) if weight.nbytes > bucket else weight

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """What verl enters to score with the reference policy: the weights as first loaded, without adapters."""
        scoring, self._scoring = self._scoring, "score_reference"
        try:
            with self.streaming.reference_weights():
                yield
        finally:
            self._scoring = scoring

    # ------------------------------------------------------------------------------------------- checkpoints

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **_: Any,
    ) -> None:
        """Write the configured contents to the folder `local_path`, which is complete or unchanged."""
        if local_path is not None:
            self.checkpoints.save(local_path, self.streaming, self.learning_rate, max_ckpt_to_keep)

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = True, **_: Any
    ) -> None:
        """Go on from the folder `local_path`. The reference stays MODEL_PATH's weights."""
        if local_path is not None:
            self.checkpoints.load(local_path, self.streaming, self.learning_rate)

    # ----------------------------------------------------------------------------------------- data parallel

    def get_data_parallel_rank(self) -> int:
        return torch.distributed.get_rank()

    def get_data_parallel_size(self) -> int:
        return torch.distributed.get_world_size()

    def get_data_parallel_group(self) -> torch.distributed.ProcessGroup:
        # verl flattens the metrics only of engines that have a group.
        return torch.distributed.group.WORLD

    def is_mp_src_rank_with_outputs(self) -> bool:
        return True


class DeviceBuffers(BaseEngineCtx):
    """Releases the device buffers at exit, unless an outer context does (`disable_auto_offload`).

    The first pass inside allocates them: only it knows how much to keep on the device.

    verl's own base tells entering from leaving by the device's name, which on the CPU platform is the same.
    """

    def __enter__(self) -> None:
        self.engine.mode = self.mode

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self.mode == "train" and (self.zero_grad_on_exit or kind is not None):
            self.engine.optimizer_zero_grad()
        if not self.disable_auto_offload and self.mode == "train":
            self.engine.release_passes()  # verl calls to("cpu") when the weights have been sent
        elif not self.disable_auto_offload:
            self.engine.release_device()
        self.engine.mode = None


def _check_engine_config(config: object) -> None:
    if not isinstance(config, MegaTrainEngineConfig):
        raise ValueError(
            f"strategy megatrain got the options of another backend ({type(config).__name__}): the patch "
            "verl_patches.config_checks was not loaded in the process that composed the configuration. Install "
            "megatrain_verl there, do not exclude it by VERL_USE_EXTERNAL_PLUGINS, or use model_engine=megatrain"
        )
    if config.forward_only and config.ref_in_actor:
        raise RuntimeError(
            "verl builds a separate reference engine although actor_rollout_ref.actor.megatrain.ref_in_actor is true: "
            "the patch verl_patches.ref_in_actor was not loaded in the process that builds the trainer. Install "
            "megatrain_verl there, do not exclude it by VERL_USE_EXTERNAL_PLUGINS, or set ref_in_actor=false"
        )
