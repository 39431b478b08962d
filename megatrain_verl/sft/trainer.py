"""verl's SFT trainer with checks before the model is loaded, and reports; the training loop is verl's own."""

import contextlib
import functools
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from hydra.errors import InstantiationException
from omegaconf import DictConfig
from verl.trainer import sft_trainer
from verl.utils.distributed import destroy_global_process_group
from verl.utils.fs import is_non_local

from megatrain_verl.sft import (
    launch,
    loss_plot,
    metrics_file,
    model_card,
    options,
    output_folder,
    process,
    progress,
    saved_files,
    stopping,
)
from megatrain_verl.sft.dataset import ChatDataset
from megatrain_verl.sft.run_state import RunState
from megatrain_verl.sft.samples import Sample, SampleWriter
from megatrain_verl.verl_backend import loggers, ranks
from megatrain_verl.verl_backend.checkpoint import ADAPTER, HUGGINGFACE
from megatrain_verl.verl_backend.processors import image_processor
from verl_patches import sft_reports

MOST_STEPS_WITHOUT_UPDATE = 10
SAMPLES, PLOT = "samples.jsonl", "loss.png"


class SFTTrainer(sft_trainer.SFTTrainer):
    """verl's trainer; what it would find out late or not at all is a ValueError before the model is loaded.

    Args:
        config: a whole run, prepared by `options.prepare`.
        command: resumes the run in a shell.
    """

    def __init__(self, config: DictConfig, command: str) -> None:
        self.state, self._command = RunState(), command
        self._first = torch.distributed.get_rank() == 0  # of several ranks, the one that writes and speaks
        self._tracking: progress.RunTracking | None = None
        self.stopped: str | None = None  # why the run ended before its last step
        self._saved_step: int | None = None  # by this process
        super().__init__(config)

    # ------------------------------------------------------------------------------------------------- building

    def _build_config(self) -> None:
        path = self.config.model.path
        if not (is_non_local(path) or self.config.model.use_shm or Path(path).is_dir()):  # else verl copies the folder
            raise ValueError(
                f"model.path={path} is no folder of a model; of a model of the hub give the local folder, after "
                f"`hf download NAME --local-dir FOLDER`"
            )
        try:
            super()._build_config()
        except InstantiationException as error:
            if isinstance(error.__cause__, OSError | ValueError):  # transformers' for a folder without a model
                raise ValueError(f"model.path={path} cannot be loaded: {error.__cause__}") from error
            raise
        options.check_model(self.config, self.model_config.hf_config)
        self.model_config.processor = image_processor(self.model_config)

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
        stops = self._stop_tokens()
        if end not in stops:  # as in base models, whose generation ends where their texts do
            model.generation_config.eos_token_id = [*stops, end]
            print(f"the trained model's generation_config.json stops at {model.tokenizer.decode(end)} as well")

    def _stop_tokens(self) -> list[int]:
        stops = self.model_config.generation_config.eos_token_id
        return list(stops) if isinstance(stops, list | tuple) else [] if stops is None else [stops]

    def _build_engine(self) -> None:
        super()._build_engine()
        self.training_client = progress.EvaluatingWorker(self.training_client)
        self.engine.checkpoints.attached.append(self)

    def _build_ckpt_handler(self) -> None:
        if self.config.trainer.resume_mode == "auto" and self.config.trainer.resume_from_path is None:
            saved_files.check_tracker(Path(self.config.trainer.default_local_dir))
        super()._build_ckpt_handler()

    def _build_dataloader(self) -> None:
        super()._build_dataloader()
        self.train_sampler.seed = self.config.trainer.seed  # verl would shuffle by the epoch's number alone
        trainer = self.config.trainer
        if trainer.total_training_steps is not None:  # verl ends after total_epochs, without saving, if that is earlier
            trainer.total_epochs = -(-trainer.total_training_steps // len(self.train_dataloader))

    # ------------------------------------------------------------------------------- with each checkpoint (Attachment)

    def write(self, folder: Path) -> None:
        """Put what the run has reached into the checkpoint that is being made, and a model card beside its weights."""
        self.state.write(folder)
        if "hf_model" in self.config.checkpoint.save_contents:
            plan = self.engine.streaming.plan
            counts = (plan.num_parameters, plan.trained_parameters)
            card = model_card.text(self.config, self._data(), *counts, self.total_training_steps, self.state)
            target = ADAPTER if (folder / ADAPTER).is_dir() else HUGGINGFACE
            (folder / target / "README.md").write_text(card, encoding="utf-8")
        self._saved_step = self.state.step

    def read(self, folder: Path) -> None:
        """Go on counting from what a checkpoint says; refuse one that verl could not go on from, or only wrongly."""
        saved_files.check_loader_state(folder)
        self.state.read(folder)

    def _data(self) -> list[dict[str, Any]]:
        return self.train_dataset.description() if isinstance(self.train_dataset, ChatDataset) else []

    # ------------------------------------------------------------------------------------------------- training

    def fit(self) -> None:
        """Train from the checkpoint, if there is one, to the last step, a reason to stop, SIGTERM or Ctrl-C."""
        folder = Path(self.config.trainer.default_local_dir)
        if self.resume_global_step >= self.total_training_steps or self._stops_early():
            print(f"the run in {folder} has ended at step {self.resume_global_step}")
            return
        self._check_position()
        if self._first:
            metrics_file.trim(folder / SAMPLES, self.resume_global_step)
        self._samples = self._sample_writer(folder / SAMPLES)
        steps, active = self.total_training_steps, self.engine.streaming.plan.active_parameters
        self._progress = progress.Progress(self.state, active, steps, self._end_step)
        path = options.metrics_path(self.config)
        written = metrics_file.continued(path, self.resume_global_step) if self._first else contextlib.nullcontext()
        with written, stopping.Termination() as self._termination:
            self._train()
        if self._first and "file" in self.config.trainer.logger:
            loss_plot.write(path, folder / PLOT)
        if self.engine.batches_without_labels:
            print(f"{self.engine.batches_without_labels} batches had no label and gave no gradient")
        if not self.last_checkpoint.is_dir():
            raise ValueError(self._other_data())

    def _train(self) -> None:
        """verl's loop, and a checkpoint where it ends before its last step."""
        try:
            with sft_reports.replaced(
                tracking=self._make_tracking, progress=self._progress.batches, seconds=lambda: self._progress.seconds
            ):
                super().fit()
        except stopping.Stopped as reason:
            self.stopped = str(reason)
            self._save()
            print(f"the run ends at step {self.state.step}: {reason}")
        except torch.OutOfMemoryError as error:
            self._keep_state(error)
            raise
        finally:
            if self._tracking is not None:
                self._tracking.finish()

    def _make_tracking(self, **settings: Any) -> progress.RunTracking:
        self._tracking = progress.RunTracking(self._complete, self._logged, **settings)
        return self._tracking

    def _complete(self, metrics: dict[str, Any], step: int) -> None:
        if "train/loss" in metrics:
            self._progress.trained(metrics, step)
        else:
            progress.evaluated(metrics, self.state, self.training_client.take_mean_loss())

    def _logged(self, metrics: dict[str, Any], step: int) -> None:
        if "val/loss" in metrics and self._samples is not None:
            with self.engine.eval_mode():
                self._samples.write(self.engine.streaming, step)

    def _sample_writer(self, file: Path) -> SampleWriter | None:
        trainer = self.config.trainer
        if self.val_dataset is None or not trainer.sample_rows or not self._first:
            return None
        rows = range(min(trainer.sample_rows, len(self.val_dataset)))
        image_token = getattr(self.model_config.processor, "image_token_id", None)
        samples = [Sample.of_row(self.val_dataset[row], image_token) for row in rows]
        samples = [sample for sample in samples if sample is not None]
        if not samples:
            return None
        stops = [*self._stop_tokens(), *([] if image_token is None else [image_token])]  # that no image would belong to
        return SampleWriter(samples, self.model_config.tokenizer, stops, trainer.sample_tokens, file, trainer.logger)

    def _end_step(self) -> None:
        """Between two steps: the data loader stands where the next one begins. All ranks go on or end alike."""
        reached = vars(self.state), self._saved_step, self._termination.requested
        state, self._saved_step, self._termination.requested = ranks.from_first(reached)
        vars(self.state).update(state)
        if self.state.steps_without_update >= MOST_STEPS_WITHOUT_UPDATE:
            raise ValueError(
                f"the gradients of the last {MOST_STEPS_WITHOUT_UPDATE} steps were not finite and nothing was trained; "
                "look at the loss in the metrics, and for damaged weights in model.path"
            )
        if self._termination.requested:
            raise stopping.Stopped(self._termination.requested)
        if self._stops_early():
            raise stopping.Stopped(
                f"the validation loss was best at step {self.state.best_step} ({self.state.best_loss}), "
                f"{self.state.evaluations_since_best} evaluations ago"
            )

    def _stops_early(self) -> bool:
        patience = self.config.trainer.early_stop_patience
        return patience is not None and self.state.evaluations_since_best >= patience

    def _keep_state(self, error: torch.OutOfMemoryError) -> None:
        """Save the last whole step: the weights and moments on the host are those after it.

        Not in one of several ranks, which have failed with it and wait for nothing any more.
        """
        if (
            torch.distributed.get_world_size() > 1
            or self.state.step == self.resume_global_step
            or not self._is_resumable
        ):
            return
        if self._progress.position is not None:
            self.ckpt_handler.train_dataloader = _Position(self._progress.position)
        self._save()
        error.add_note(f"Step {self.state.step} is saved. To go on from it, with a smaller need:\n  {self._command}")

    def _save(self) -> None:
        if self._saved_step != self.state.step:
            self.ckpt_handler.save_checkpoint(self.state.step)

    @property
    def _is_resumable(self) -> bool:
        return "model" in self.config.checkpoint.save_contents

    def how_to_go_on(self) -> str:
        """For a run that was told to end: the command that resumes it."""
        if not self._is_resumable:
            return "it cannot be resumed: checkpoint.save_contents is without model and optimizer"
        return f"to go on: {self._command}"

    # ------------------------------------------------------------------------------------------------- resuming

    def _check_position(self) -> None:
        """Compare the restored iterator with the step to go on from; at the end of an epoch, let it start afresh.

        verl would take an iterator that stands at an epoch's end for the whole next epoch, and train nothing in it.
        """
        state = ranks.from_first(self.train_dataloader.next_iter_state)
        if state is None:
            return
        self._share_position(state)
        steps = len(self.train_dataloader)
        done = (self.resume_global_step - 1) % steps + 1
        if state.get("_num_yielded", done) != done:
            raise ValueError(self._other_data())
        if done == steps:
            self.train_dataloader.next_iter_state = None

    def _share_position(self, state: dict[str, Any]) -> None:
        """Every rank goes on from the first one's position, which may be of a run with another number of ranks."""
        sampler = state.get("_sampler_iter_state")
        if isinstance(sampler, dict) and "samples_yielded" in sampler:
            sampler["samples_yielded"] = state["_num_yielded"] * self.train_batch_size_per_dp
        self.train_dataloader.next_iter_state = state

    @property
    def last_checkpoint(self) -> Path:
        """What the last step saves."""
        step = self.state.step if self.stopped else max(self.total_training_steps, self.resume_global_step)
        return Path(self.config.trainer.default_local_dir) / f"global_step_{step}"

    def _other_data(self) -> str:
        return (
            f"the checkpoint in {self.config.trainer.default_local_dir} is of a run with other data or another "
            "data.train_batch_size and cannot be continued with these; set trainer.resume_mode=disable or another "
            "trainer.default_local_dir"
        )


class _Position:
    """What verl's checkpoint handler asks of a data loader, for one that has gone on since."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state_dict = functools.partial(dict, state)


def run(config: DictConfig) -> None:
    """Train as `config` says, in this process or in one for each of several devices, and say where the model is.

    Raises:
        ValueError: wrong options or data, before the model is loaded.
        RuntimeError: one of several processes failed; names it.
    """
    options.prepare(config, process.device())
    loggers.use_output_folder(config.trainer.default_local_dir)
    arguments = config, stopping.resume_command(config, sys.orig_argv, os.environ)
    with output_folder.claimed(Path(config.trainer.default_local_dir)):
        if devices := options.devices(config):
            launch.run_ranks(train, arguments, devices)
        else:
            with process.single_process():
                train(*arguments)


def train(config: DictConfig, command: str) -> None:
    """One rank of a run, whose environment says which; `command` resumes the run."""
    process.meet()
    try:
        trainer = SFTTrainer(config, command)
        trainer.fit()
    finally:
        destroy_global_process_group()
    if "file" in config.trainer.logger:
        print(f"metrics: {options.metrics_path(config)}")
    if "hf_model" in config.checkpoint.save_contents:
        folder, what = trainer.last_checkpoint, "trained model (a MODEL_PATH for transformers, vLLM and RL)"
        if (folder / ADAPTER).is_dir():
            print(f"trained adapter (for peft): {folder / ADAPTER}")
        else:
            print(f"{what}: {folder / HUGGINGFACE}")
    if trainer.stopped in [number.name for number in stopping.SIGNALS]:
        print(trainer.how_to_go_on())
