"""`python -m megatrain_verl.main_ppo`: verl's PPO/GRPO trainer on the streaming engine; options as in verl.

The same as `python -m verl.trainer.main_ppo model_engine=megatrain`, and works where Hydra does not find this
package's search-path plug-in. Loggers write to `trainer.default_local_dir`, unless the environment says where.
"""

import hydra
from omegaconf import DictConfig
from verl.trainer import main_ppo

from megatrain_verl.verl_backend import loggers


@hydra.main(config_path="verl_backend/conf", config_name="megatrain_ppo", version_base=None)
def main(config: DictConfig) -> None:
    """Train as verl's `main_ppo` does."""
    loggers.use_new_file(config.trainer.default_local_dir)  # a Ray that verl starts gets this environment
    main_ppo.main.__wrapped__(config)


if __name__ == "__main__":
    main()
