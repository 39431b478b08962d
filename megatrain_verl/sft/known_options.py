"""Options that a configuration file sets and that do not exist: Hydra refuses them on the command line only."""

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from megatrain_verl.sft.known import check_known

PRIMARY = "megatrain_sft"


def check(config: DictConfig) -> None:
    """Compare `config`, that of the Hydra job, with the options that there are.

    Below an option that is empty or null by default anything may be set, and so may what the command line adds by `+`.

    Raises:
        ValueError: names the unknown option and the nearest known one.
    """
    added = [override.lstrip("+").split("=")[0] for override in HydraConfig.get().overrides.task if override[0] == "+"]
    compare(config, hydra.compose(PRIMARY), added)


def compare(config: DictConfig, known: DictConfig, added: list[str], prefix: str = "") -> None:
    """Check the keys of `config`, which lies below `prefix` of the whole, against those of `known`."""
    for key in config:
        name = f"{prefix}{key}"
        if any(name == path or path.startswith(f"{name}.") for path in added) and key not in known:
            continue
        check_known(key, known, f"key of the section {prefix[:-1]}" if prefix else "section of the configuration")
        expected, found = known._get_node(key), config._get_node(key)
        if not isinstance(expected, DictConfig) or not expected:
            continue
        if isinstance(found, DictConfig) and not found._is_none() and not found._is_interpolation():
            compare(found, expected, added, f"{name}.")
        elif not prefix:
            raise ValueError(f"section {name} of the configuration must map options to values, got {found}")
