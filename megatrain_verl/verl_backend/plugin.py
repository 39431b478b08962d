"""Entry point `verl.plugins`: verl imports this module in every process that imports verl.

verl loads the attribute and never calls it, so the work is done on import. It must stay light: vLLM's workers import
verl too. verl swallows exceptions of plug-ins; this one is logged as an error and kept, and the engine's configuration
raises it (`registration.register_engine`).
"""

import logging
import os

from megatrain_verl.verl_backend import registration

logger = logging.getLogger(__name__)


def register() -> None:
    """The entry point's target; everything has been done when it exists."""


def _activate() -> None:
    import verl_patches

    # verl sets the root logger to WARNING and the level of its own modules by this variable.
    logging.getLogger("megatrain_verl").setLevel(os.environ.get("VERL_LOGGING_LEVEL", "INFO"))
    if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
        from megatrain_verl.verl_backend import platform

        platform.register()
    verl_patches.apply_all()
    registration.register_engine()


try:
    _activate()
except Exception as error:
    logger.error("the verl plug-in of megatrain_verl cannot be used in this process: %s", error, exc_info=True)
    registration.plugin_failure = error
    raise
