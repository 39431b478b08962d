"""verl's replay buffer with shorter waits, for rollouts that take seconds (`trainer.v1.sampler.custom_sampler`)."""

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import KVBatchMeta, ReplayBuffer

POLL_SECONDS = 0.2


class PromptSampler(ReplayBuffer):
    """Looks for finished rollouts every 0.2 s; verl 0.9.1 does every 2 s and has no option for it.

    Which rollouts are taken, and when they are complete, is verl's own.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, poll_interval=POLL_SECONDS, **kwargs)

    def sample(self, *args: Any, **kwargs: Any) -> tuple[KVBatchMeta, dict[str, Any]]:
        """verl's; it takes failed rollouts for finished ones without tokens.

        Raises:
            RuntimeError: every rollout failed, as they do when vLLM has died.
        """
        batch, metrics = super().sample(*args, **kwargs)
        if not batch.keys:
            raise RuntimeError("no response was generated: every rollout of this step failed, see the errors above")
        return batch, metrics
