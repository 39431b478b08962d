"""What verl 0.9.1 has no extension point for: one small file per patch, each with its reason.

A patch compares the source it relies on with the one it was written for and raises RuntimeError if verl has changed.
Patches are idempotent and wait for the module they change, so that `import verl` stays light.
"""

import os

from verl_patches import atomic_tracker, config_checks, cpu_process_group, ref_in_actor, rollout_failure


def apply_all() -> None:
    """Apply every patch of verl to this process.

    Raises:
        RuntimeError: verl is not the version a patch was written for.
    """
    config_checks.apply()
    ref_in_actor.apply()
    atomic_tracker.apply()
    rollout_failure.apply()
    if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
        cpu_process_group.apply()
