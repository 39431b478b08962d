"""verl's SFT trainer with checks before the model is loaded; the training loop is verl's own."""

from pathlib import Path

from omegaconf import DictConfig
from verl.trainer import sft_trainer
from verl.utils.distributed import destroy_global_process_group, initialize_global_process_group

from megatrain_verl.sft import metrics_file, options, process
from megatrain_verl.sft.dataset import ChatDataset
from megatrain_verl.verl_backend.checkpoint import HUGGINGFACE


class SFTTrainer(sft_trainer.SFTTrainer):
    """verl's trainer; what it would find out late or not at all is a ValueError before the model is loaded."""

    def _build_config(self) -> None:
        super()._build_config()
        options.check_model(self.config, self.model_config.hf_config)

    def _build_dataset(self) -> None:
        super()._build_dataset()
        batch_size = self.config.data.train_batch_size
        for kind, dataset in (("train", self.train_dataset), ("validation", self.val_dataset)):
            if dataset is None:
                continue
            if len(dataset) < batch_size:
                unit = "packs" if getattr(dataset, "packs", None) else "usable rows"
                raise ValueError(
                    f"the {kind} data has {len(dataset)} {unit}, less than one batch of "
                    f"data.train_batch_size={batch_size}"
                )
        if isinstance(self.train_dataset, ChatDataset):
            self._match_model(self.train_dataset)
        if self.val_dataset is not None and len(self.val_dataset) % batch_size:
            rest = len(self.val_dataset) % batch_size
            print(f"validation data: the last {rest} rows are not used; verl evaluates whole batches of {batch_size}")

    def _match_model(self, dataset: ChatDataset) -> None:
        model = self.model_config
        vocab_size = model.hf_config.get_text_config().vocab_size
        if dataset.largest_token() >= vocab_size:
            raise ValueError(
                f"the tokenizer makes token id {dataset.largest_token()}, but {model.path} has {vocab_size} embeddings"
            )
        end = dataset.end_of_turn()
        stops = model.generation_config.eos_token_id
        stops = list(stops) if isinstance(stops, list | tuple) else [] if stops is None else [stops]
        if end not in stops:  # as in base models, whose generation ends where their texts do
            model.generation_config.eos_token_id = [*stops, end]
            print(f"the trained model's generation_config.json stops at {model.tokenizer.decode(end)} as well")

    def _build_dataloader(self) -> None:
        super()._build_dataloader()
        self.train_sampler.seed = self.config.trainer.seed  # verl would shuffle by the epoch's number alone
        trainer = self.config.trainer
        if trainer.total_training_steps is not None:  # verl ends after total_epochs, without saving, if that is earlier
            trainer.total_epochs = -(-trainer.total_training_steps // len(self.train_dataloader))

    def _init_engine(self) -> None:
        super()._init_engine()
        self.steps_per_epoch = min(self.steps_per_epoch, self.total_training_steps)  # what the progress bar counts to

    def fit(self) -> None:
        """Train from the checkpoint, if there is one, to the last step."""
        if self.resume_global_step >= self.total_training_steps:
            print(f"the run in {self.config.trainer.default_local_dir} has ended at step {self.resume_global_step}")
            return
        self._check_position()
        with metrics_file.continued(options.metrics_path(self.config), self.resume_global_step):
            super().fit()
        if self.engine.batches_without_labels:
            print(f"{self.engine.batches_without_labels} batches had no label and gave no gradient")
        if not self.last_checkpoint.is_dir():
            raise ValueError(self._other_data())

    def _check_position(self) -> None:
        """Compare the restored iterator with the step to go on from; at the end of an epoch, let it start afresh.

        verl would take an iterator that stands at an epoch's end for the whole next epoch, and train nothing in it.
        """
        state = self.train_dataloader.next_iter_state
        if state is None:
            return
        steps = len(self.train_dataloader)
        done = (self.resume_global_step - 1) % steps + 1
        if state.get("_num_yielded", done) != done:
            raise ValueError(self._other_data())
        if done == steps:
            self.train_dataloader.next_iter_state = None

    @property
    def last_checkpoint(self) -> Path:
        """What the last step saves."""
        step = max(self.total_training_steps, self.resume_global_step)
        return Path(self.config.trainer.default_local_dir) / f"global_step_{step}"

    def _other_data(self) -> str:
        return (
            f"the checkpoint in {self.config.trainer.default_local_dir} is of a run with other data or another "
            "data.train_batch_size and cannot be continued with these; set trainer.resume_mode=disable or another "
            "trainer.default_local_dir"
        )


def run(config: DictConfig) -> None:
    """Train as `config` says, in this process, and say where the model is.

    Raises:
        ValueError: wrong options or data, before the model is loaded.
    """
    options.prepare(config, process.device())
    with process.single_process():
        initialize_global_process_group()
        try:
            trainer = SFTTrainer(config)
            trainer.fit()
        finally:
            destroy_global_process_group()
    if "file" in config.trainer.logger:
        print(f"metrics: {options.metrics_path(config)}")
    if "hf_model" in config.checkpoint.save_contents:
        print(f"trained model (a MODEL_PATH for transformers, vLLM and RL): {trainer.last_checkpoint / HUGGINGFACE}")
