"""`python -m megatrain_verl.sft`: verl's SFT trainer on the streaming engine, in one process; Hydra overrides.

    python -m megatrain_verl.sft model.path=MODEL data.dataset_dir=FOLDER data.dataset=NAME

trains on NAME of FOLDER/dataset_info.json. Options are verl's; `conf/megatrain_sft.yaml` shows what is added.
`--config FILE` takes a configuration of the MegaTrain reference (`reference_config.py`).
"""

import sys

import hydra
from omegaconf import DictConfig

from megatrain_verl.sft import reference_config, search_path


@hydra.main(config_path="conf", config_name="megatrain_sft", version_base=None)
def train(config: DictConfig) -> None:
    """Train; everything heavy is imported only now."""
    from megatrain_verl.sft import known_options, trainer

    known_options.check(config)
    trainer.run(config)


def main() -> None:
    """Run with the arguments of the command line."""
    search_path.register()
    try:
        sys.argv[1:] = reference_config.expand(sys.argv[1:])
    except ValueError as error:
        sys.exit(f"error: {error}")
    train()


if __name__ == "__main__":
    main()
