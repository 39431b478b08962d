"""The streaming engine as a training backend of verl 0.9.1, called `megatrain`.

`plugin.py` is what verl loads in each process, `config.py` what its configuration names, `engine.py` what its workers
call. What verl has no hook for is in the package `verl_patches`.
"""
