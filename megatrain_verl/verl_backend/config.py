"""Options of the megatrain engine as verl's configuration names them (`_target_`), checked when they are made.

verl imports this module in the driver and in each worker before it looks the engine up, so importing it registers the
engine: that works without any entry point.
"""

from dataclasses import dataclass, field, fields
from typing import Any

from verl.workers.config import ActorConfig, EngineConfig, FSDPOptimizerConfig, OptimizerConfig

from megatrain_verl.config import StreamingConfig
from megatrain_verl.verl_backend import process_env, registration
from megatrain_verl.verl_backend.optimizer import adamw_config
from megatrain_verl.verl_backend.options import check_checkpoint_contents, refuse_unknown_options


@refuse_unknown_options("the megatrain engine's options")
@dataclass
class MegaTrainEngineConfig(EngineConfig, StreamingConfig):
    """verl's engine options and those of the streaming engine, in one namespace.

    `dtype`, `seed`, `forward_only` and `full_determinism` are verl's; `param_offload` and `optimizer_offload` are
    always true, since parameters and optimizer state live on the host.

    Raises:
        ValueError: an unknown name, or a value outside its range.
    """

    strategy: str = "megatrain"
    param_offload: bool = True
    optimizer_offload: bool = True
    # Keep MODEL_PATH's weights beside the trained ones (2 bytes per parameter in bfloat16) and let the actor compute
    # the reference log-probs. False: verl builds a second, forward-only engine for them.
    ref_in_actor: bool = True
    # Size of verl's buffer for the weight transfer to the rollout, in MiB. Larger tensors bypass it, and verl can
    # send those from the device only. Follows rollout.checkpoint_engine.update_weights_bucket_megabytes.
    update_weights_bucket_megabytes: int = 2048
    # File that gets a JSON line for each phase of the engine, for a timeline (docs/rl-timeline.md). None: no trace.
    trace_file: str | None = None

    def __post_init__(self) -> None:
        EngineConfig.__post_init__(self)
        StreamingConfig.__post_init__(self)
        if self.strategy != "megatrain":
            raise ValueError(f"the megatrain engine's strategy is megatrain, got {self.strategy!r}")
        for name in ("param_offload", "optimizer_offload"):
            if not getattr(self, name):
                raise ValueError(f"megatrain.{name}=False is not possible: weights and AdamW state live on the host")
        if self.router_replay.mode != "disabled":
            raise ValueError("megatrain.router_replay is not supported: set router_replay.mode=disabled")

    def streaming_config(self) -> StreamingConfig:
        """The part of the options that the streaming engine takes."""
        return StreamingConfig(**{option.name: getattr(self, option.name) for option in fields(StreamingConfig)})


@refuse_unknown_options("the megatrain actor's options")
@dataclass
class MegaTrainActorConfig(ActorConfig):
    """Options of a megatrain actor, or with `megatrain.forward_only` of a separate reference policy.

    Raises:
        ValueError: an unknown name, or what the engine does not do: another optimizer than AdamW, asynchronous
            saving, quantisation-aware training, prefix grouping.
    """

    strategy: str = "megatrain"
    megatrain: MegaTrainEngineConfig = field(default_factory=MegaTrainEngineConfig)
    optim: OptimizerConfig = field(default_factory=FSDPOptimizerConfig)
    # verl's other backends pad or pack by this; the streaming engine always packs.
    use_remove_padding: bool = True
    use_rollout_log_probs: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.engine = self.megatrain
        unsupported = {
            "use_prefix_grouper=True": self.use_prefix_grouper,
            "qat.enable=True": self.qat.get("enable", False),
            "checkpoint.async_save=True": self.checkpoint.async_save,
        }
        for option, is_set in unsupported.items():
            if is_set:
                raise ValueError(f"actor.{option} is not supported by megatrain")
        check_checkpoint_contents(self.checkpoint)
        if not self.megatrain.forward_only:
            adamw_config(self.optim)

    def validate(self, n_gpus: int, train_batch_size: int, model_config: Any = None) -> None:
        """verl's checks, and what only the whole run's options show. Called in the driver before Ray starts."""
        super().validate(n_gpus, train_batch_size, model_config)
        if model_config is not None:
            registration.check_merged(model_config)
            registration.check_lora_only(model_config, self.checkpoint)


process_env.allow_concurrent_streams()
registration.register_engine()
