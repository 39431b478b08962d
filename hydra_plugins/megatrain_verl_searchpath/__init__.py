"""Lets Hydra find this package's groups, so that `model_engine=megatrain` works with verl's own commands."""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class MegaTrainSearchPathPlugin(SearchPathPlugin):
    """Appends the configuration folder of the megatrain engine to every Hydra search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Called by Hydra before it composes a configuration."""
        search_path.append(provider="megatrain_verl", path="pkg://megatrain_verl.verl_backend.conf")
