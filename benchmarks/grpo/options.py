"""Hydra overrides of configs/rl/qwen2_5_7b_grpo_80gb.yaml for a benchmark run, by trainer."""

from dataclasses import dataclass
from pathlib import Path

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
TRAINERS = ("megatrain", "fsdp")
REWARD = Path(__file__).with_name("reward.py")


@dataclass(frozen=True)
class Workload:
    """One GRPO step: `n` responses of exactly `response_len` tokens to each of `prompts` prompts of `prompt_len`.

    Attributes:
        steps: measured ones, after `warm_up` others.
        kl_reference: with a KL loss, hence reference log-probs.
        micro_batch_tokens: at most that many tokens per micro-batch.
        gpu_memory_utilization: the share of the device that vLLM takes.
        enforce_eager: vLLM without CUDA graphs: it starts faster and generates more slowly.
        ranks: each with a device and a vLLM of its own; they share the sequences.

    Raises:
        ValueError: the sequences cannot be divided among the ranks.
    """

    prompts: int
    n: int
    prompt_len: int
    response_len: int
    steps: int
    warm_up: int
    kl_reference: bool
    micro_batch_tokens: int
    gpu_memory_utilization: float
    enforce_eager: bool
    trainer: str
    hardware: str
    ranks: int = 1

    def __post_init__(self) -> None:
        if self.sequences % self.ranks:
            raise ValueError(f"{self.sequences} sequences (prompts x n) cannot be divided among {self.ranks} devices")

    @property
    def sequences(self) -> int:
        return self.prompts * self.n

    @property
    def row_tokens(self) -> int:
        return self.prompt_len + self.response_len

    @property
    def total_steps(self) -> int:
        return self.warm_up + self.steps


def overrides(work: Workload, folder: Path) -> list[str]:
    """The overrides of a run whose inputs and outputs are in `folder`."""
    # One micro-batch holds whole rows; 0 in verl's options is none of these.
    tokens = max(work.micro_batch_tokens, work.row_tokens)
    options = [
        f"hardware={work.hardware}",
        f"data.train_batch_size={work.prompts}",
        f"data.max_prompt_length={work.prompt_len}",
        f"data.max_response_length={work.response_len}",
        "data.filter_overlong_prompts=False",
        "data.dataloader_num_workers=0",
        f"{ACTOR}.ppo_mini_batch_size={work.prompts}",
        f"{ACTOR}.ppo_max_token_len_per_gpu={tokens}",
        f"{ACTOR}.use_kl_loss={work.kl_reference}",
        f"{ROLLOUT}.n={work.n}",
        f"{ROLLOUT}.ignore_eos=True",
        f"{ROLLOUT}.max_model_len={work.row_tokens}",
        f"{ROLLOUT}.max_num_seqs={work.sequences}",
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu={tokens}",
        f"{ROLLOUT}.gpu_memory_utilization={work.gpu_memory_utilization}",
        f"{ROLLOUT}.enforce_eager={work.enforce_eager}",
        f"{ROLLOUT}.agent.num_workers=1",
        "reward.num_workers=1",
        f"reward.custom_reward_function.path={REWARD}",
        "reward.custom_reward_function.name=hashed",
        f"trainer.n_gpus_per_node={work.ranks}",
        *([f"ray_kwargs.ray_init.num_gpus={work.ranks}"] if work.hardware == "cpu" else []),
        f"trainer.total_training_steps={work.total_steps}",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        f"trainer.default_local_dir={folder}/checkpoints",
        f"hydra.run.dir={folder}",
    ]
    if work.trainer == "megatrain":
        return [*options, f"{ACTOR}.megatrain.trace_file={folder}/trace.jsonl"]
    return [*options, *fsdp(work.hardware)]


def fsdp(hardware: str) -> list[str]:
    """verl's own FSDP2 engine, on a GPU with everything offloaded; padded rows and SDPA, which need no flash-attn."""
    options = [
        "model_engine=dp",
        f"~{ACTOR}.megatrain",
        f"{ACTOR}.strategy=fsdp2",
        f"{ACTOR}.fsdp_config.param_offload=True",
        f"{ACTOR}.fsdp_config.optimizer_offload=True",
        "actor_rollout_ref.ref.fsdp_config.param_offload=True",
        "actor_rollout_ref.model.use_remove_padding=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    ]
    if hardware == "cpu":
        precision = "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"
        options += [
            f"{ACTOR}.fsdp_config.use_torch_compile=False",
            f"+{ACTOR}.fsdp_config.mixed_precision={precision}",
            f"{ACTOR}.fsdp_config.param_offload=False",
            f"{ACTOR}.fsdp_config.optimizer_offload=False",
        ]
    return options
