"""Supervised fine-tuning: verl's SFT trainer on the streaming engine, with LLaMA-Factory's data formats.

`python -m megatrain_verl.sft` composes `conf/megatrain_sft.yaml` (`__main__.py`), checks it (`options.py`) and runs
`trainer.py`. A row's way: `registry.py` finds the file, `json_files.py` reads it, `conversations.py` brings a row into
chat form, `chat_template.py` renders it and marks what is trained, `dataset.py` hands it to verl.
"""

import warnings

# verl names each of its other engines that is not installed.
warnings.filterwarnings("ignore", r"\w+ engine is not available", UserWarning)
