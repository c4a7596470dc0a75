"""The training loop: the only one with side effects.

What makes resuming exact: a checkpoint holds the state, the position in the data of the batches that made it, and what
the loop itself counts (`train.checkpoint.Progress`); rows of the record that come after it are dropped; and whatever
else a step of the loop writes (the model folders) is written before its checkpoint. So a process may die at any moment,
and the next one repeats what is missing.
"""

import collections
import contextlib
import dataclasses
import math
import shlex
import signal
import time
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import jax

from tfm.batch import Batch
from tfm.nn.layers import compute_dtype
from tfm.nn.models import build_model
from tfm.nn.param_axes import check_heads, param_shardings
from tfm.nn.params import count_params, param_shapes
from tfm.pipeline import TextModel
from tfm.sharding import Placement
from tfm.store import check_replaceable, save_model
from tfm.text_metrics import HIGHER_IS_BETTER, signature
from tfm.tokenizer import Tokenizer
from train.checkpoint import Checkpoints, Progress
from train.config import RESUME_MAY_CHANGE, TrainConfig, changed_fields, to_json, with_absolute_paths
from train.device import placement_of
from train.evaluate import evaluate, held_out_loss
from train.instruments import Clock, Compilations, Made, Window, count_positions
from train.optimizer import make_optimizer
from train.prepare import Prepared, prepare, with_tokenizers
from train.run_folder import RunFolder
from train.signals import Signals, StopReason
from train.step import StepMetrics, init_state, make_eval_step, make_train_step, place_batch

Reason = Literal["steps", "patience"] | StopReason

_IN_FLIGHT = 2
"""Steps that the device may be behind: enough that it never waits for the host, few enough to notice bad ones soon."""


class NonFiniteError(ValueError):
    """Too many steps in a row whose loss or gradient was not finite."""


@runtime_checkable
class Reports(Protocol):
    """What the loop tells, as `train.progress.Reporter` takes it."""

    def message(self, text: str) -> None: ...
    def warn(self, text: str) -> None: ...
    def start(self, run_dir: Path, *, step: int, total_steps: int) -> None: ...
    def step(self, step: int, row: dict[str, Any]) -> None: ...
    def record(self, row: dict[str, Any]) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run, or this session of it, ended."""

    reason: Reason
    """`steps`: all are done; `patience`: no better metric for as many validations as were allowed; `interrupted` by
    Ctrl-C and `terminated` by SIGTERM: saved, and to be resumed."""
    step: int
    metrics: dict[str, float]
    """Of the last validation; empty before the first."""
    best_metric: float | None = None
    """Of `validation.metric`, in the step below."""
    best_step: int | None = None
    steps_made: int = 0
    """In this session; 0 where the run was complete already."""
    compilations: int = 0
    """Of the training step in this session; one for each shape of batches that came."""

    @property
    def exit_status(self) -> int:
        """Of a process that does nothing but train."""
        return {"interrupted": 128 + signal.SIGINT, "terminated": 128 + signal.SIGTERM}.get(self.reason, 0)


def train(config: TrainConfig, run_dir: str | Path, *, reporter: Reports) -> Outcome:
    """Trains a model, or goes on with the run that is in the folder, until the run is complete or is told to stop.

    SIGTERM and Ctrl-C end it after the step at hand (and its validation, if one is due), with a checkpoint; a second
    Ctrl-C ends the process at once. Before the first step they end it at once, as SystemExit and KeyboardInterrupt.
    Signals are left alone where this is not the main thread.

    Args:
        config: of a new run. Of a run that is resumed, what it was begun with, but for `RESUME_MAY_CHANGE`.
        run_dir: nothing, an empty folder, or a run; see `train.run_folder`.
        reporter: told all that happens; started and closed here.

    Raises:
        NonFiniteError: `max_bad_steps` steps in a row were not finite. The last checkpoint is from before them, or from
            where the run was told to stop among them.
        ValueError: the folder holds something else or is in use, settings have changed that may not, or the data cannot
            be used; nothing has been changed then.
        OSError: a checkpoint could not be written, or not in time.
    """
    config, folder = with_absolute_paths(config), RunFolder(run_dir)
    folder.is_run()  # says what is wrong with the folder before anything is made in it
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(Signals())
        stack.enter_context(folder.locked())

        def open_checkpoints(tokenizers: tuple[Tokenizer, Tokenizer]) -> Checkpoints:
            made_of = {"config": to_json(config), "tokenizers": [tokenizer.to_json() for tokenizer in tokenizers]}
            return stack.enter_context(
                Checkpoints(folder.checkpoints, config.checkpoint, run=made_of, warn=reporter.warn)
            )

        if folder.is_run():
            tokenizers = folder.read_tokenizers()
            config = with_tokenizers(config, *tokenizers)
            before = with_absolute_paths(folder.read_config())
            _check_changes(folder, before, config)
            for model_folder in (folder.best, folder.last):
                check_replaceable(model_folder)
            checkpoints = open_checkpoints(tokenizers)
            if (outcome := _complete(config, checkpoints)) is not None:
                reporter.message(
                    f"the run in {folder.path} is complete ({_words(outcome, config.validation.metric)}): nothing to do"
                )
                return outcome
            placement = _placement(config)
            session = _Session(prepare(config, tokenizers), placement, folder, checkpoints, reporter, signals)
            session.restore()
            if note := _schedule_note(before, config):
                reporter.warn(note)
        else:
            prepared = prepare(config)
            config, placement = prepared.config, _placement(prepared.config)
            made = (prepared.source_tokenizer, prepared.target_tokenizer)
            folder.create(config, *made)
            session = _Session(prepared, placement, folder, open_checkpoints(made), reporter, signals)
        return session.run()


def _check_changes(folder: RunFolder, before: TrainConfig, config: TrainConfig) -> None:
    changes = changed_fields(before, config)
    refused = [f"{key} was {old!r}, now {new!r}" for key, (old, new) in changes.items() if key not in RESUME_MAY_CHANGE]
    if refused:
        raise ValueError(
            f"the run in {folder.path} was begun with other settings: {'; '.join(refused)}. Give another folder for a "
            f"new run, or go on with the settings it has: tfm train --run {shlex.quote(str(folder.path))}. Only "
            f"{', '.join(sorted(RESUME_MAY_CHANGE))} may change"
        )


def _placement(config: TrainConfig) -> Placement | None:
    """How the run lies on the devices. Raises ValueError where it cannot, before anything has been made."""
    placement = placement_of(config.mesh)
    if placement is not None:
        check_heads(placement, config.model)
        param_shardings(placement, param_shapes(config.model))
    return placement


def _mesh_words(placement: Placement) -> str:
    sizes = " × ".join(f"{name} {size}" for name, size in placement.mesh.shape.items())
    return f"{placement.mesh.size} ({sizes})"


def _schedule_note(old: TrainConfig, new: TrainConfig) -> str | None:
    """What other steps mean for a schedule that ends with them; see `train.config.RESUME_MAY_CHANGE`."""
    if old.steps == new.steps or new.optimizer.schedule not in ("cosine", "linear"):
        return None
    return (
        f"steps were {old.steps:,} and are now {new.steps:,}: from here on the learning rate is that of a "
        f"{new.optimizer.schedule} schedule over {new.steps:,} steps, so it jumps, and the run will differ from one "
        f"that had them from the start"
    )


class _Session:
    """One process's part of a run."""

    def __init__(
        self,
        prepared: Prepared,
        placement: Placement | None,
        folder: RunFolder,
        checkpoints: Checkpoints,
        reporter: Reports,
        signals: Signals,
    ) -> None:
        self._prepared = prepared
        self._config = config = prepared.config
        self._folder, self._checkpoints, self._reporter, self._signals = folder, checkpoints, reporter, signals
        self._placement = placement
        model = build_model(config.model, dtype=config.dtype, placement=placement)
        optimizer = make_optimizer(config.optimizer, config.steps)
        self._train_step = make_train_step(model, optimizer, config)
        self._eval_step = make_eval_step(model)
        self._state = init_state(model, optimizer, config)
        self._text_model: TextModel | None = None
        self._step = 0
        self._bad_in_row = 0
        self._progress = Progress()
        self._window = Window({})
        self._clock = Clock()
        self._compilations = Compilations()
        self._saved_step = 0
        self._shapes_met: set[tuple[int, ...]] = set()
        self._batches = prepared.train.iterator()

    def restore(self) -> None:
        """Goes to the newest checkpoint, where there is one."""
        restored = self._checkpoints.restore_latest(self._state)
        if restored is None:
            return
        self._batches.set_state(restored.data_position)
        self._state, self._progress, self._step = restored.state, restored.progress, restored.step
        self._saved_step = restored.step
        self._bad_in_row = int(self._state.skipped_in_row)
        self._window = Window(self._progress.window, begun=self._progress.seconds)
        self._clock = Clock(self._progress.seconds)
        if self._progress.best_step is not None and not self._folder.best.exists():
            self._reporter.warn(
                f"{self._folder.best} is gone, the model of step {self._progress.best_step:,}: it will come again with "
                f"the first better {self._config.validation.metric}"
            )
        if restored.jax_version != jax.__version__:
            self._reporter.warn(
                f"the checkpoint is from jax {restored.jax_version}, this is {jax.__version__}: the run goes on, but "
                "its numbers will differ in their last digits from what they would have been"
            )

    def run(self) -> Outcome:
        """Trains until there is a reason to stop."""
        config, first_step = self._config, self._step
        self._introduce()
        self._reporter.start(self._folder.path, step=self._step, total_steps=config.steps)
        self._folder.write_config(config)  # not before all else has gone well: steps may have changed
        try:
            with self._signals.deferred(), self._compilations:
                reason = self._loop()
                self._checkpoints.wait()
        finally:
            self._batches.close()
            self._reporter.close()
        outcome = _outcome(
            reason,
            self._step,
            self._progress,
            steps_made=self._step - first_step,
            compilations=self._compilations.count,
        )
        self._reporter.message(
            f"stopped at step {self._step:,}: {_words(outcome, config.validation.metric)}. The training step was "
            f"compiled {_times(outcome.compilations)}, for {_counted(len(self._shapes_met), 'shape')} of batches"
        )
        if outcome.compilations > len(self._shapes_met):
            self._reporter.warn("the training step was compiled more than once for a shape, which only takes time")
        if outcome.exit_status:
            self._reporter.message(f"saved; to go on: tfm train --run {shlex.quote(str(self._folder.path))}")
        return outcome

    def _introduce(self) -> None:
        config, tell = self._config, self._reporter.message
        for note in self._prepared.notes:
            tell(note)
        metric = config.validation.metric
        if self._prepared.examples and (how := signature(metric, self._prepared.examples.references)):
            tell(f"{metric} is {how}")
        device = jax.devices()[0]
        spread = "" if self._placement is None else f" {_mesh_words(self._placement)} of"
        tell(
            f"{count_params(self._state.params):,} parameters; on{spread} {device.device_kind} in "
            f"{compute_dtype(config.dtype)}"
        )
        if self._step:
            tell(f"going on with {self._folder.path} at step {self._step:,} of {config.steps:,}")

    def _loop(self) -> Reason:
        config = self._config
        in_flight: collections.deque[Made] = collections.deque()
        self._clock.go()
        while True:
            if (reason := self._signals.reason) is not None:
                self._read(in_flight, keep=0)
                if self._step > self._saved_step:
                    self._save()
                return reason
            batch = next(self._batches)
            self._meet(batch)
            begun, compilations = time.monotonic(), self._compilations.count
            placed = place_batch(self._placement, batch, accumulation_steps=config.batch.accumulation_steps)
            with self._compilations.counted():
                self._state, metrics = self._train_step(self._state, placed)
            if self._compilations.count > compilations:
                self._clock.leave_out(time.monotonic() - begun)
            self._step += 1
            in_flight.append(Made(self._step, metrics, *count_positions(batch)))

            validates = self._validates_at(self._step)
            saves = self._step % config.checkpoint.every_steps == 0
            pause = validates or saves or self._step == config.steps
            self._read(in_flight, keep=0 if pause else _IN_FLIGHT)
            if validates:
                saves |= self._validate()
            stop = _reason_to_stop(config, self._step, self._progress)
            # A step may be finite and yet spoil the parameters: those that follow it are not. What was saved before
            # must not be pushed out by checkpoints of such a state.
            if stop is not None or (saves and not self._bad_in_row):
                self._save()
            if stop is not None:
                return stop

    def _meet(self, batch: Batch) -> None:
        """Says that a shape is compiled, which takes a while, when its first batch comes."""
        shape = (*batch.source.shape, batch.target_in.shape[1])
        if shape not in self._shapes_met:
            self._shapes_met.add(shape)
            rows, source, target = shape
            self._reporter.message(
                f"compiling for batches of {rows} × ({source}, {target}): shape {len(self._shapes_met)} of "
                f"{len(self._prepared.train.shapes)}"
            )

    def _read(self, in_flight: collections.deque[Made], *, keep: int) -> None:
        """Waits for the oldest steps, until `keep` are left that the device may still be at."""
        while len(in_flight) > keep:
            made = in_flight.popleft()
            metrics: StepMetrics = jax.device_get(made.metrics)
            self._window.add(metrics, made)
            self._bad_in_row = 0 if metrics.finite else self._bad_in_row + 1
            row = self._window.row(metrics, made.step, self._clock.seconds)
            self._reporter.step(made.step, row)
            if made.step % self._config.log_every_steps == 0 or made.step == self._config.steps:
                self._reporter.record(row)
                self._window = Window({}, begun=self._clock.seconds)
            if self._bad_in_row >= self._config.max_bad_steps:
                last = f"the last checkpoint is of step {self._saved_step:,}" if self._saved_step else "none was saved"
                raise NonFiniteError(
                    f"step {made.step:,}: loss or gradient was not finite, {self._bad_in_row} times in a row "
                    f"(max_bad_steps); {last}. A new run with a lower learning rate, more warmup or clipping usually "
                    "helps"
                )

    def _validates_at(self, step: int) -> bool:
        every = self._config.validation.every_steps
        return self._prepared.validation is not None and (step % every == 0 or step == self._config.steps)

    def _validate(self) -> bool:
        """Measures, records and keeps the best model; says whether it is this one."""
        config, prepared, progress = self._config.validation, self._prepared, self._progress
        assert prepared.validation is not None
        with self._clock.paused():
            held_out = prepared.validation
            batches = (place_batch(self._placement, batch) for batch in held_out)
            metrics = held_out_loss(self._eval_step, self._state.params, batches, text_bytes=held_out.text_bytes)
            row: dict[str, Any] = {"step": self._step, "split": "validation", **metrics}
            if len(prepared.examples):
                evaluation = evaluate(
                    self._current_model(),
                    prepared.examples,
                    [] if config.metric == "loss" else [config.metric],
                    max_tokens=self._config.max_new_tokens,
                    max_examples=config.max_examples,
                    samples=min(config.samples, config.max_examples),
                )
                metrics |= evaluation.metrics
                row |= evaluation.metrics
                row["samples"] = [dataclasses.asdict(sample) for sample in evaluation.samples]
            row["seconds"] = self._clock.seconds
            self._reporter.record(row)

            # Nothing to answer, or not a number: no better than anything.
            value = metrics.get(config.metric, math.nan)
            sign = 1 if HIGHER_IS_BETTER[config.metric] else -1
            best = progress.best_metric
            is_best = math.isfinite(value) and (best is None or sign * value > sign * best)
            if is_best:
                progress = dataclasses.replace(progress, best_metric=value, best_step=self._step)
                self._save_model(self._folder.best)
            since = 0 if is_best else progress.validations_since_best + 1
            self._progress = dataclasses.replace(progress, validations_since_best=since, metrics=metrics)
        return is_best

    def _current_model(self) -> TextModel:
        if self._text_model is None:
            prepared = self._prepared
            self._text_model = TextModel(
                self._config.model,
                self._state.params,
                prepared.source_tokenizer,
                prepared.target_tokenizer,
                weights=self._config.dtype,
                placement=self._placement,
            )
        return self._text_model.replace_params(self._state.params)

    def _save_model(self, folder: Path) -> None:
        prepared = self._prepared
        save_model(folder, self._config.model, self._state.params, prepared.source_tokenizer, prepared.target_tokenizer)

    def _save(self) -> None:
        """The model folder first and the checkpoint last: where that is, all that belongs before it is there, too."""
        with self._clock.paused():
            self._save_model(self._folder.last)
            self._reporter.flush()
            progress = dataclasses.replace(self._progress, seconds=self._clock.seconds, window=self._window.sums)
            self._checkpoints.save(self._step, self._state, self._batches.get_state(), progress)
            self._saved_step = self._step


def _reason_to_stop(config: TrainConfig, step: int, progress: Progress) -> Reason | None:
    if step >= config.steps:
        return "steps"
    patience = config.validation.patience
    return "patience" if patience and progress.validations_since_best >= patience else None


def _complete(config: TrainConfig, checkpoints: Checkpoints) -> Outcome | None:
    """How a run ended that has ended."""
    latest = checkpoints.latest_progress()
    if latest is None or (reason := _reason_to_stop(config, *latest)) is None:
        return None
    return _outcome(reason, *latest)


def _outcome(reason: Reason, step: int, progress: Progress, *, steps_made: int = 0, compilations: int = 0) -> Outcome:
    return Outcome(
        reason=reason,
        step=step,
        metrics=progress.metrics,
        best_metric=progress.best_metric,
        best_step=progress.best_step,
        steps_made=steps_made,
        compilations=compilations,
    )


def _words(outcome: Outcome, metric: str) -> str:
    why = {
        "steps": "all steps are done",
        "patience": "no better metric within validation.patience",
        "interrupted": "interrupted",
        "terminated": "terminated",
    }[outcome.reason]
    best = outcome.best_step
    return why if best is None else f"{why}; best {metric} {outcome.best_metric:.4f} at step {best:,}"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"
