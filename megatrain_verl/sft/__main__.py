"""`python -m megatrain_verl.sft`: verl's SFT trainer on the streaming engine, in one process; Hydra overrides.

    python -m megatrain_verl.sft model.path=MODEL data.dataset_dir=FOLDER data.dataset=NAME

trains on NAME of FOLDER/dataset_info.json. Options are verl's; `conf/megatrain_sft.yaml` shows what is added.
"""

import hydra
from omegaconf import DictConfig

from megatrain_verl.sft import search_path


@hydra.main(config_path="conf", config_name="megatrain_sft", version_base=None)
def main(config: DictConfig) -> None:
    """Train; everything heavy is imported only now."""
    from megatrain_verl.sft import trainer

    trainer.run(config)


if __name__ == "__main__":
    search_path.register()
    main()
