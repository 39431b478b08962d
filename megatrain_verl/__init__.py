"""megatrain_verl: full-parameter RL and SFT of large language models on one GPU."""

__version__ = "0.1.0"
