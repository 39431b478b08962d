"""Checks of a whole verl run in the driver, before Ray, the models and the rollout start.

Called by `verl_patches.config_checks`; every error is a ValueError that names the option and the remedy.
"""

import copy

from omegaconf import DictConfig
from transformers import PretrainedConfig
from verl.trainer.distillation import is_distillation_enabled
from verl.trainer.ppo.utils import need_reference_policy
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.device import get_device_name
from verl.workers.config import HFModelConfig

from megatrain_verl.resources import HostPlan, check_host_memory, check_shared_memory
from megatrain_verl.streaming import linear_attention, reference_file
from megatrain_verl.streaming.attention import check_available
from megatrain_verl.streaming.model_plan import ModelPlan, plan_model
from megatrain_verl.streaming.quantised_weights import stored_weights
from megatrain_verl.streaming.unnamed_file import UnnamedFile
from megatrain_verl.streaming.weight_folder import WeightFolder
from megatrain_verl.verl_backend import llama4_rollout, prompt_files, registration

MIB = 1 << 20


def check_options(config: DictConfig) -> None:
    """Refuse what the options alone show to be impossible; `config` is a whole verl run with a megatrain actor."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    if not trainer.use_v1:
        raise ValueError("verl's legacy trainer is not supported by megatrain; set trainer.use_v1=True")
    registration.refuse_several_hosts(trainer.nnodes)
    if trainer.v1.trainer_mode == "separate_async":
        raise ValueError("trainer.v1.trainer_mode=separate_async is not supported by megatrain; use sync")
    if rollout.checkpoint_engine.backend != "naive":
        raise ValueError(
            "megatrain sends weights to a rollout on the same GPU only; set "
            "actor_rollout_ref.rollout.checkpoint_engine.backend=naive"
        )
    if is_distillation_enabled(config.get("distillation")):
        raise ValueError("distillation is not supported by megatrain; set distillation.enabled=False")
    if not rollout.temperature > 0:
        raise ValueError(f"actor_rollout_ref.rollout.temperature must be positive to train, got {rollout.temperature}")
    _check_token_budgets(config)


def check_inputs(config: DictConfig) -> None:
    """Refuse a model, shared memory or data set with which the run would fail later or train wrongly."""
    model: HFModelConfig = omega_conf_to_dataclass(config.actor_rollout_ref.model)
    engine = config.actor_rollout_ref.actor.megatrain
    device = get_device_name()
    check_available(engine.get("attn_implementation", "auto"), engine.get("dtype", "bfloat16"), device)
    _check_length(config, model.hf_config)
    llama4_rollout.check(config, model.hf_config, model.local_path, longest_row(config))
    # Refuses what the engine would train wrongly.
    lora = registration.lora_settings(model)
    with linear_attention.without_kernels():  # the driver takes no memory of a GPU
        plan = plan_model(copy.deepcopy(model.hf_config), engine.get("freeze", ()), lora, engine.get("expert_parts", 1))
    linear_attention.check_kernels(plan.structures)
    with WeightFolder(model.local_path) as folder:
        plan.hub = plan.hub.as_in(weight.header.name for weight in stored_weights(folder))
    _check_host_memory(config, plan)
    if device == "cpu":
        _check_weight_transfer(config, plan)
    prompt_files.check(config.data, model.tokenizer, model.processor)


def longest_row(config: DictConfig) -> int:
    """Tokens of the longest prompt with the longest response that the options allow."""
    return config.data.max_prompt_length + config.data.max_response_length


def _check_token_budgets(config: DictConfig) -> None:
    actor, ref, rollout = (config.actor_rollout_ref[name] for name in ("actor", "ref", "rollout"))
    if not actor.use_dynamic_bsz:
        return
    budgets = {
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": actor.ppo_max_token_len_per_gpu,
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": rollout.log_prob_max_token_len_per_gpu,
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": ref.log_prob_max_token_len_per_gpu,
    }
    for option, tokens in budgets.items():
        if tokens is not None and tokens < longest_row(config):
            raise ValueError(
                f"{option}={tokens} is less than data.max_prompt_length + data.max_response_length = "
                f"{longest_row(config)}: one row would not fit into a micro-batch"
            )


def _check_length(config: DictConfig, hf_config: PretrainedConfig) -> None:
    limit = config.actor_rollout_ref.actor.megatrain.get("max_seq_len")
    name = "actor_rollout_ref.actor.megatrain.max_seq_len"
    if limit is None:
        limit, name = (
            getattr(hf_config.get_text_config(), "max_position_embeddings", None),
            "the model's max_position_embeddings",
        )
    if limit is not None and longest_row(config) > limit:
        raise ValueError(
            f"data.max_prompt_length + data.max_response_length = {longest_row(config)} exceeds {name} = {limit}"
        )


def _check_host_memory(config: DictConfig, plan: ModelPlan) -> None:
    """The arenas of the actor, and of a separate reference engine if there is one, must fit before anything starts."""
    engine = omega_conf_to_dataclass(config.actor_rollout_ref.actor.megatrain)
    streaming = engine.streaming_config()
    ranks = config.trainer.n_gpus_per_node
    copies = engine.ref_in_actor and plan.lora is None  # without its adapters the actor is the reference
    actor = HostPlan.of(plan, streaming, trainable=True, reference=copies, ranks=ranks)
    if streaming.reference_folder is not None and need_reference_policy(config):
        _check_reference_folder(streaming.reference_folder, actor.file_bytes, plan, engine.ref_in_actor)
    if need_reference_policy(config) and not engine.ref_in_actor and plan.lora is None:
        reference = HostPlan.of(plan, streaming, trainable=False, reference=False)
        both = actor.bytes_by_kind | {"reference engine": reference.total}
        actor = HostPlan(both, actor.parameters)
    check_host_memory(actor, streaming)


def _check_reference_folder(folder: str, nbytes: int, plan: ModelPlan, ref_in_actor: bool) -> None:
    if plan.lora is not None:
        raise ValueError("reference_folder: with LoRA the reference is the model without adapters; leave it out")
    if not ref_in_actor:
        raise ValueError("reference_folder is for the actor's own reference: set ref_in_actor=true or leave it out")
    UnnamedFile(folder, nbytes, reference_file.OPTION).close()


def _check_weight_transfer(config: DictConfig, plan: ModelPlan) -> None:
    """Without CUDA IPC each weight must fit into the buffer in shared memory."""
    option = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"
    bucket = config.actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes * MIB
    itemsize = 4 if config.actor_rollout_ref.actor.megatrain.get("dtype") == "float32" else 2
    blocks = [block for name in plan.hub.names for block in plan.hub.blocks(name)]
    largest = max(blocks, key=lambda block: block.numel)
    nbytes = largest.numel * itemsize
    if nbytes > bucket:
        raise ValueError(
            f"{plan.hub.checkpoint_name(largest)} has {nbytes} bytes and does not fit into the weight transfer's "
            f"buffer; set {option}={-(-nbytes // MIB)} or more"
        )
    check_shared_memory(bucket * config.trainer.n_gpus_per_node)  # each rank fills one, all at once
