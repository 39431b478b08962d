"""Settings of the streaming engine: one dataclass, checked when it is made."""

from dataclasses import dataclass, field

COMPUTE_DTYPES = ("bfloat16", "float32")
GRAD_DTYPES = ("auto", "bfloat16", "float32")
ATTENTION_IMPLEMENTATIONS = ("auto", "sdpa", "varlen", "flash_attention_2", "flex_attention", "eager")
OPTIMIZER_BACKENDS = ("auto", "native", "deepspeed", "torch")


@dataclass
class StreamingConfig:
    """How the streaming engine runs. No field changes what is computed, except the two dtypes and the seed.

    Raises:
        ValueError: a value outside its range; the message names the field and what it may be.
    """

    # Type of the weights on the device. bfloat16 keeps the FP32 master as two 16-bit halves on the host;
    # float32 keeps and streams the master itself (what CPU runs and exactness tests use).
    dtype: str = "bfloat16"
    # Type of the gradient that waits on the host for AdamW. "auto" is the compute dtype: 2 bytes/parameter less
    # than float32. Adding gradients over several `forward_backward` calls needs float32: bfloat16 loses small terms.
    grad_dtype: str = "auto"
    # Keep the input of every K-th of n layers; the backward pass walks K layers again from it. 1 is the fastest: with
    # K > 1 most layer weights cross PCIe three times, not twice, and n/K + K - 1 layer inputs are held instead of n.
    checkpoint_interval: int = 1
    # Device memory for kept layer inputs, in GiB; what is more goes to page-locked host memory and comes back in time.
    # None: what is free when a step starts, less the working memory. The inputs that a checkpoint_interval above 1
    # computes again are not part of it; they stay on the device.
    device_activation_gb: float | None = None
    # How many layers may keep on the device more than streaming needs: weights, and what autograd saved, so that they
    # are neither sent nor computed again. None: as many as are worth it and fit into the free device memory when a step
    # starts, with the gradients of several waves of micro-batches too if that is faster. 0: lean, the least memory.
    resident_layers: int | None = None
    # Parts in which the experts of a mixture layer are streamed. 1: a layer is on the device as a whole. More parts
    # need less device memory; attention of such a layer runs once more in the backward pass. Then resident_layers is 0,
    # and there is one process only.
    expert_parts: int = 1
    # Share of the device's memory that the engine plans to use, if that much is free; what streaming needs at least may
    # be more. The RL actor takes the rollout's: in training it uses what a sleeping vLLM has released, no more.
    gpu_memory_utilization: float = 0.95
    # Most tokens whose layer inputs are kept at a time. A step with more runs in waves, whose gradients are added on
    # the host in float32 (2 bytes/parameter more in bfloat16 mode). None: one wave, or what resident_layers chooses.
    wave_tokens: int | None = None
    # Pinned host slabs through which gradients pass when they are added on the host. 4 keep the copy engine busy.
    num_grad_slabs: int = 4
    # Longest sequence accepted, in tokens. None: the model's max_position_embeddings.
    max_seq_len: int | None = None
    # "auto" takes SDPA for rows of equal length and a variable-length kernel for packed rows on CUDA;
    # the other names force one kernel. On CPU every choice but flash_attention_2 runs SDPA row by row.
    attn_implementation: str = "auto"
    # Compile the decoder layer with torch.compile, once per structure group: half a minute at the first step.
    compile_layers: bool = False
    # Tokens per chunk of the token head, whose peak memory is about 18 bytes x chunk x vocabulary.
    head_chunk_tokens: int = 1024
    # Host AdamW kernel. "auto": the native one, or torch's fused AdamW with one warning if there is no C compiler.
    optimizer_backend: str = "auto"
    # Threads of the host optimizer. None: the cores this process may use (sched_getaffinity), whatever
    # OMP_NUM_THREADS says (Ray and torchrun set it to 1).
    cpu_threads: int | None = None
    # Host memory, in GiB, for AdamW that starts before the gradient norm is known: the last layers are updated behind
    # the backward pass, into spare arenas (12 bytes/parameter), on the guess that the norm needs no clipping. If it
    # does, or is not finite, the results are dropped. All GPUs of the host share these arenas. 0: off.
    speculative_adamw_gb: float = 0.0
    # Let the device update the last part of every unit while the host's cores update the rest: same bits, less time.
    # 14 bytes/parameter in and 12 out over PCIe, 336 MB of device memory. None: on CUDA, with the native kernel.
    device_adamw: bool | None = None
    # Host memory that may be used, in GiB. None: what the kernel and the cgroup report as available. Set it on
    # virtual machines whose memory grows with use and that therefore report too little.
    host_memory_gb: float | None = None
    # Folder on a local disk for a file with the weights of the reference policy, which are then not kept in host memory
    # (2 bytes/parameter less in bfloat16, but two buffers of the largest unit). Every reference pass reads it; with one
    # GPU only. The file has no name and goes with the process. None: in host memory.
    reference_folder: str | None = None
    # Parameters that are not trained: shell-style patterns of their names ("model.embed_tokens.*"). They have no
    # gradient and no AdamW state: 2 bytes of host memory per parameter in bfloat16.
    freeze: list[str] = field(default_factory=list)
    # Seed of the dropout masks (keyed by step, micro-batch and layer) and of the start of LoRA adapters.
    seed: int = 0

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, COMPUTE_DTYPES)
        _one_of("grad_dtype", self.grad_dtype, GRAD_DTYPES)
        _one_of("attn_implementation", self.attn_implementation, ATTENTION_IMPLEMENTATIONS)
        _one_of("optimizer_backend", self.optimizer_backend, OPTIMIZER_BACKENDS)
        _at_least("checkpoint_interval", self.checkpoint_interval, 1)
        _at_least("expert_parts", self.expert_parts, 1)
        _at_least("num_grad_slabs", self.num_grad_slabs, 1)
        _at_least("head_chunk_tokens", self.head_chunk_tokens, 1)
        if isinstance(self.freeze, str):
            raise ValueError(f"freeze must be a list of patterns, got {self.freeze!r}; write [{self.freeze!r}]")
        for name in ("max_seq_len", "cpu_threads", "wave_tokens"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        if self.resident_layers is not None:
            _at_least("resident_layers", self.resident_layers, 0)
        if self.expert_parts > 1:
            if self.resident_layers or self.checkpoint_interval > 1:
                raise ValueError(
                    f"expert_parts={self.expert_parts} keeps no layer on the device and every layer's input: leave "
                    "resident_layers and checkpoint_interval out"
                )
            if self.reference_folder is not None:
                raise ValueError("reference_folder reads whole layers, expert_parts sends parts of them: leave one out")
        if self.device_activation_gb is not None and not self.device_activation_gb >= 0:
            raise ValueError(f"device_activation_gb must be >= 0 or null, got {self.device_activation_gb}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must lie in (0, 1], got {self.gpu_memory_utilization}")
        if not self.speculative_adamw_gb >= 0:
            raise ValueError(f"speculative_adamw_gb must be >= 0, got {self.speculative_adamw_gb}")
        if self.host_memory_gb is not None and not self.host_memory_gb > 0:
            raise ValueError(f"host_memory_gb must be positive, got {self.host_memory_gb}")
        if self.dtype == "float32" and self.grad_dtype == "bfloat16":
            raise ValueError("grad_dtype=bfloat16 with dtype=float32 would round exact gradients; use grad_dtype=auto")
        if self.wave_tokens is not None and self.grad_dtype == "bfloat16":
            raise ValueError("wave_tokens adds gradients on the host, which needs grad_dtype=float32 or auto")

    @property
    def most_resident_layers(self) -> int | None:
        """`resident_layers`, which is 0 where experts are streamed in parts."""
        return 0 if self.expert_parts > 1 else self.resident_layers

    @property
    def host_grad_dtype(self) -> str:
        """Type of the gradient arenas: "auto" is float32 where gradients are added on the host, else `dtype`."""
        if self.grad_dtype != "auto":
            return self.grad_dtype
        return self.dtype if self.wave_tokens is None else "float32"


@dataclass
class LoraSettings:
    """LoRA: low-rank adapters beside linear layers, which stay as they are (https://arxiv.org/abs/2106.09685).

    Raises:
        ValueError: a value outside its range.
    """

    rank: int
    # What an adapter adds is multiplied by alpha / rank.
    alpha: float = 16
    # As in peft: "all-linear", a regular expression, or ends of module names.
    target_modules: str | list[str] = "all-linear"
    exclude_modules: str | list[str] | None = None

    def __post_init__(self) -> None:
        _at_least("lora_rank", self.rank, 1)
        if not self.alpha > 0:
            raise ValueError(f"lora_alpha must be positive, got {self.alpha}")
        if not self.target_modules:
            raise ValueError("target_modules is empty: name the linear layers that get an adapter, or all-linear")


@dataclass
class AdamWConfig:
    """AdamW with decoupled weight decay; field names as in `torch.optim.AdamW`.

    Raises:
        ValueError: a value outside its range.
    """

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    # Largest global gradient norm; larger gradients are scaled down to it. None never clips.
    clip_grad: float | None = 1.0
    # Decay every parameter (as torch does) or leave out one-dimensional ones: norms and biases.
    decay_norms_and_biases: bool = True

    def __post_init__(self) -> None:
        self.betas = (float(self.betas[0]), float(self.betas[1]))
        if not self.lr >= 0:
            raise ValueError(f"lr must be >= 0, got {self.lr}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must lie in [0, 1), got {self.betas}")
        if not self.eps > 0:
            raise ValueError(f"eps must be positive, got {self.eps}")
        if not self.weight_decay >= 0:
            raise ValueError(f"weight_decay must be >= 0, got {self.weight_decay}")
        if self.clip_grad is not None and not self.clip_grad > 0:
            raise ValueError(f"clip_grad must be positive or null, got {self.clip_grad}")


def _one_of(field: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{field} must be one of {', '.join(allowed)}, got {value!r}")


def _at_least(field: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{field} must be a whole number >= {least}, got {value!r}")
