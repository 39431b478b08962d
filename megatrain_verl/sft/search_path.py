"""Lets Hydra find verl's and this package's groups, so that a configuration needs no `hydra.searchpath`."""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

FOLDERS = ("megatrain_verl.sft.conf", "megatrain_verl.verl_backend.conf", "verl.trainer.config")


class SFTSearchPathPlugin(SearchPathPlugin):
    """Appends the folders to the search path of every composition."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Called by Hydra before it composes a configuration."""
        for folder in FOLDERS:
            search_path.append(provider="megatrain_verl.sft", path=f"pkg://{folder}")


def register() -> None:
    """Make the plug-in known to Hydra in this process."""
    Plugins.instance().register(SFTSearchPathPlugin)
