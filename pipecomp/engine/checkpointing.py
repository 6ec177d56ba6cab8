"""Saving and loading a run: what DeepSpeed does not know of is written beside its files.

TAG/   DeepSpeed's checkpoint
    pipecomp-rank-R.pt                     rank R's random generators, and what its message stores held
    pipecomp-messages-rank-R/data.mdb      the stores themselves, with store.in_checkpoints
    pipecomp-gradients-…-rank-R            error-feedback residuals of compressed gradients
    pipecomp-local-steps-stage-S-replica-R.pt   a replica's own weights and optimizer states, with local steps
    pipecomp-seal-R.json                   manifest, written last, see `checkpoint.manifest`
latest   DeepSpeed's file, which names the last TAG that is whole
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import torch

from pipecomp.checkpoint import manifest, reshard_load
from pipecomp.checkpoint.rng_state import random_state, set_random_state
from pipecomp.checkpoint.writing import Attempts, NotingWriter, private, write_state
from pipecomp.config import Config
from pipecomp.config.activations import FEWEST, bits_text, plain_bits
from pipecomp.distributed.collectives import broadcast, gathered
from pipecomp.distributed.consistency import AllRanks
from pipecomp.engine.gradient_exchange import load_residuals, save_residuals
from pipecomp.errors import CheckpointError, ConfigError, PipecompError, StoreError, WireError, require
from pipecomp.optim import QuantizedAdam
from pipecomp.optim.adam import thaw
from pipecomp.plan.auto_bits import wants_measuring
from pipecomp.stages.link.handshake import summarize
from pipecomp.utils.files import atomic_write_text

_STATE_KEY = "pipecomp"

_log = logging.getLogger(__name__)


class Resumed(NamedTuple):
    """How a run goes on.

    exact: every rank holds the messages of the checkpoint's step, so that losses will be the same, bit for bit.
    dropped: samples that this rank's links forgot, because their ends differed.
    """

    exact: bool
    dropped: int


@dataclass(slots=True)
class Progress:
    """batches_taken: micro-batches of the training data that this replica has trained on. evaluations: so far."""

    batches_taken: int = 0
    evaluations: int = 0


class LoadOptions(TypedDict):
    """DeepSpeed's keyword arguments of `load_checkpoint`."""

    load_module_strict: bool
    load_optimizer_states: bool
    load_lr_scheduler_states: bool
    load_module_only: bool
    custom_load_fn: Any


class Checkpoints:
    """Saves and loads everything that a run needs to go on. engine: whose; every rank calls the same methods."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    # -- saving

    def check_precision(self) -> None:
        """ConfigError for bf16 without ZeRO: DeepSpeed 0.19 cannot load what it would save."""
        engine = self._engine
        if engine.using_bf16_optimizer and not engine.zero_optimization():
            raise ConfigError(
                "zero_optimization.stage",
                0,
                "1, with data_types.grad_accum_dtype 'fp32', for checkpoints of bf16 training: DeepSpeed cannot load "
                "what it saves without",
            )

    def warn_of_precision(self) -> None:
        """Log at the start what `check_precision` would raise, when hours of training are over."""
        try:
            self.check_precision()
        except ConfigError as error:
            _log.warning("this run cannot save checkpoints (save_pretrained works): %s", error)

    def check_state(self, client_state: dict | None) -> None:
        """ConfigError for a key of the user's state that DeepSpeed would write over what it has to load."""
        for key in client_state or {}:
            allowed = "keys that the checkpoint does not have itself"
            require(key not in (*reshard_load.DEEPSPEEDS, "global_samples", _STATE_KEY), "client_state", key, allowed)

    def save(self, save_dir: str, tag: Any, client_state: dict | None, *, latest: bool, stock: Callable) -> Any:
        """See `PipelineEngine.save_checkpoint`. stock: DeepSpeed's, complete but for state and tag.

        Raises CheckpointError on every rank if one of them cannot write; then nothing of it is left.
        """
        engine = self._engine
        own: dict[str, Any] = asdict(engine.progress)
        if engine.run is not None:
            own["run"] = engine.run.id
        tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
        folder = Path(save_dir) / tag
        own["pipeline"] = asdict(reshard_load.describe(engine))
        own["per_epoch"] = engine.micro_batches_per_epoch
        own["data"] = engine.data_facts
        if wants_measuring(engine.configured):
            own["bits"] = [_bits(engine.configured), _bits(engine.pipecomp_config)]
        if engine.local is not None:
            own["local_steps"] = engine.local.outer.stats()
        state = {**(client_state or {}), _STATE_KEY: own}
        first_here = os.environ.get("LOCAL_RANK", "0") == "0"
        attempts = Attempts(folder)
        writer, engine.checkpoint_engine = engine.checkpoint_engine, NotingWriter(engine.checkpoint_engine, attempts)
        try:
            with private():
                attempts.attempt(lambda: folder.mkdir(parents=True, exist_ok=True))
                attempts.attempt(lambda: manifest.clear(folder))
                attempts.agree()
                with engine.common_weights():
                    done = stock(save_dir, tag=tag, client_state=state, save_latest=False)
                if engine.local is not None:
                    attempts.attempt(lambda: engine.local.save(folder))
                attempts.attempt(lambda: save_residuals(engine.gradients.states(), folder, engine.global_rank))
                attempts.attempt(lambda: self._save_rank(folder))
                attempts.agree()  # everything is written
                if first_here:
                    attempts.attempt(lambda: manifest.write(folder, engine.global_rank))
                attempts.agree()
                if latest and engine.global_rank == 0:
                    attempts.attempt(lambda: atomic_write_text(Path(save_dir) / "latest", tag))
                attempts.agree()  # after that, older ones may be deleted
        except CheckpointError:
            if first_here:
                manifest.remove(folder)
                shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            engine.checkpoint_engine = writer
        return done

    def _save_rank(self, folder: Path) -> None:
        engine = self._engine
        environment = engine.links.environment
        if environment is not None and engine.pipecomp_config.store.in_checkpoints:
            environment.save(manifest.messages_copy(folder, engine.global_rank))
        state = {"random": random_state(), "messages": self._messages_held()}
        write_state(state, _rank_file(folder, engine.global_rank))

    # -- loading

    def load(self, load_dir: str, tag: Any, options: LoadOptions, *, stock: Callable) -> tuple[Any, Any]:
        """See `PipelineEngine.load_checkpoint`. stock: DeepSpeed's."""
        # The first rank has written `latest`, and without a common disk no other machine has it.
        tag = _below(broadcast(_latest(load_dir))) if tag is None else str(tag)
        if tag is None:
            _log.warning("%s has no file 'latest', and so no checkpoint to go on from", load_dir)
            return None, None
        folder = Path(load_dir) / tag
        try:
            return self._load(folder, options, stock)
        except PipecompError:
            raise
        except Exception:  # what torch and pickle raise of a file that was cut off names none
            problem = manifest.problem(folder) if manifest.finished(folder) else None
            require(problem is None, "load_dir", str(folder), f"a whole checkpoint: {problem}")
            raise

    def _load(self, folder: Path, options: LoadOptions, stock: Callable) -> tuple[Any, Any]:
        engine = self._engine
        self._check_finished(folder)
        if engine.local is not None:
            engine.local.outer.arrive()  # what loads residuals asks the ranks that an average may still be asking
        with_optimizer = options["load_optimizer_states"] and not options["load_module_only"]
        saved = reshard_load.saved_otherwise(engine, folder, _STATE_KEY, with_optimizer=with_optimizer)
        if saved is None:
            # With an adapter, frozen weights are not in the files.
            strict = options["load_module_strict"] and engine.stage.adapter is None
            path, state = stock(str(folder.parent), folder.name, **{**options, "load_module_strict": strict})
        elif options["custom_load_fn"] is not None:
            raise ConfigError("custom_load_fn", options["custom_load_fn"], "None: a pipeline's stages load themselves")
        else:
            path, state = reshard_load.load(
                engine,
                saved,
                load_optimizer_states=options["load_optimizer_states"],
                load_lr_scheduler_states=options["load_lr_scheduler_states"],
                load_module_only=options["load_module_only"],
            )
        if path is None:
            return path, state
        if with_optimizer:
            self._settle_optimizer()
        own = (state or {}).pop(_STATE_KEY, None)
        if options["load_module_only"]:
            if engine.local is not None:
                engine.local.outer.forget()
            return path, state
        same = own is None or self._same_pipeline(own["pipeline"])
        if same:
            with AllRanks(missed=engine.guard.missed).collective_errors():
                load_residuals(engine.gradients.states(), folder, engine.global_rank, engine.device)
        else:
            states = dict(engine.gradients.states())
            for compressed in states.values():
                compressed.forget()
            if engine.global_rank == 0 and states:
                _log.warning("%s is of another pipeline: gradient methods begin anew, without residuals", folder)
        self._load_local(own or {}, folder, same=same, with_optimizer=options["load_optimizer_states"])
        if own is not None:
            if same:
                self._take_bits(own.get("bits"), folder)
            self._go_on(own, folder, same)
        return path, state

    def _settle_optimizer(self) -> None:
        """Let what was loaded go on with this run's settings and kind of optimizer."""
        engine = self._engine
        if engine.zero_optimization():
            engine.optimizer.clip_grad = engine.gradient_clipping()  # DeepSpeed takes the checkpoint's
            if not engine.zero_load_from_fp32_weights():
                engine.optimizer.refresh_fp32_params()  # DeepSpeed leaves the new model's in bf16
        elif not isinstance(engine.optimizer, QuantizedAdam):
            thaw(engine.optimizer)

    def _check_finished(self, folder: Path) -> None:
        """ConfigError for a checkpoint that is not there, or that a run did not live to finish."""
        with AllRanks(missed=self._engine.guard.missed).collective_errors():
            require(folder.is_dir(), "load_dir", str(folder), "a checkpoint's folder on the machine of every rank")
            state = reshard_load.read_state(folder)
        # A manifest on any machine says that all have written. DeepSpeed's own checkpoints have none.
        told = gathered((state is None or _STATE_KEY in state, manifest.finished(folder)))
        whole = any(finished for _, finished in told) or not all(ours for ours, _ in told)
        require(
            whole, "load_dir", str(folder), "a finished checkpoint: this one has no manifest; give the tag of another"
        )

    def _load_local(self, own: dict[str, Any], folder: Path, *, same: bool, with_optimizer: bool) -> None:
        engine, saved = self._engine, own.get("local_steps")
        if engine.local is not None:
            pipeline = None if saved is None else own["pipeline"]
            with AllRanks(missed=engine.guard.missed).collective_errors():
                engine.local.load(folder, pipeline, same=same, with_optimizer=with_optimizer)
        elif saved is not None and saved["averaged_at"] < engine.global_steps and engine.global_rank == 0:
            step = saved["averaged_at"]
            _log.warning("%s has local steps, which are left behind: weights are those after step %d", folder, step)

    def _take_bits(self, saved: list[dict[str, Any]] | None, folder: Path) -> None:
        """Go on with the bits that the run found when it began, if it is asked for the same: losses depend on them."""
        engine = self._engine
        if saved is None or saved[0] != _bits(engine.configured) or saved[1] == _bits(engine.pipecomp_config):
            return
        a = replace(engine.pipecomp_config.activations, **saved[1])
        engine.take_bits(replace(engine.pipecomp_config, activations=a))
        if engine.global_rank == 0:
            both = f"{bits_text(a.forward_bits)} forward, {bits_text(a.backward_bits)} back"
            _log.warning("bits: %s, as %s has them, not what was measured now", both, folder)

    def _same_pipeline(self, pipeline: dict[str, Any]) -> bool:
        engine = self._engine
        return (pipeline["cuts"], pipeline["replicas"]) == (list(engine.plan.cuts), engine.grid.data_parallel_size)

    def _go_on(self, own: dict[str, Any], folder: Path, same: bool) -> None:
        engine = self._engine
        engine.progress = Progress(self._batches_taken(own), own["evaluations"])
        engine.seek_loader()
        file = _rank_file(folder, engine.global_rank)
        saved = torch.load(file, weights_only=True) if same and file.is_file() else None
        if saved is not None:
            set_random_state(saved["random"])
        if engine.run is None:
            return
        all_ranks = AllRanks(missed=engine.guard.missed)
        exact, others = False, self._other_data(own.get("data", {}))
        with all_ranks.collective_errors():
            engine.run.loaded(own.get("run"))
            if others:
                engine.links.forget()
            elif saved is not None:
                exact = self._take_messages(folder, saved["messages"])
        if others and engine.global_rank == 0:
            words = "cached activations are of other samples, each of which is sent as a first visit again"
            _log.warning("%s is of other training data (%s): %s", folder, ", ".join(others), words)
        dropped = engine.links.agree()
        engine.resumed = Resumed(all(all_ranks.all_gather_object(exact and not dropped)), dropped)

    def _other_data(self, saved: dict[str, Any]) -> list[str]:
        """Say what any rank, of which only some load data, finds different in them; every rank must call this."""
        engine = self._engine
        if engine.pipecomp_config.store.clusters is not None:  # centers are of no samples
            return []
        differ = {key: own for key, own in sorted(engine.data_facts.items()) if saved.get(key, own) != own}
        told = gathered([f"{key}: {own}, then {saved[key]}" for key, own in differ.items()])
        return next(filter(None, told), [])

    def _batches_taken(self, own: dict[str, Any]) -> int:
        """Where this run goes on in its data: in the same epoch, of which as many samples were taken.

        Epochs leave out what fills no micro-batch, which is more or less with micro-batches of another size.
        """
        engine, pipeline, per_epoch = self._engine, own["pipeline"], self._engine.micro_batches_per_epoch
        epoch, place = 0, own["batches_taken"]
        if per_epoch is not None and own.get("per_epoch") is not None:
            epoch, place = divmod(place, own["per_epoch"])
        samples = place * pipeline["micro_batch"] * pipeline["replicas"]
        return epoch * (per_epoch or 0) + samples // (engine.micro_batch_size * engine.grid.data_parallel_size)

    def _take_messages(self, folder: Path, held: dict[str, Any]) -> bool:
        """Hold what this rank held at the checkpoint, if that is possible. False if it is not."""
        if self._messages_held() == held:
            return True
        environment = self._engine.links.environment
        assert environment is not None
        copy = manifest.messages_copy(folder, self._engine.global_rank)
        if not environment.restore(copy):
            return False
        if self._messages_held() != held:
            raise StoreError(f"{copy}: not what the checkpoint says that it holds; without it, training can go on")
        return True

    def _messages_held(self) -> dict[str, Any]:
        """For each link the store's version: number of samples, their highest version, digest of all."""
        return {str(end.index): list(summarize(end.store)) for end in self._engine.links if end.store is not None}


def _latest(load_dir: str) -> str | None:
    """The tag of the last checkpoint; None if there is none."""
    latest = Path(load_dir) / "latest"
    return latest.read_text(encoding="utf-8").strip() if latest.is_file() else None


def _below(tag: Any) -> str | None:
    """What rank 0 names, as a place in this rank's own folder: what is read there is unpickled. WireError if it is not.

    A latest file of anybody else's making is no reason to leave the folder, either.
    """
    if tag is not None and (not isinstance(tag, str) or Path(tag).is_absolute() or ".." in Path(tag).parts):
        raise WireError(f"rank 0 names a checkpoint {tag!r}, allowed: a folder in that of the checkpoints")
    return tag


def _bits(config: Config) -> dict[str, Any]:
    """The bits of both directions, as JSON has them."""
    return {key: plain_bits(getattr(config.activations, key)) for key in FEWEST}


def _rank_file(folder: Path, rank: int) -> Path:
    return folder / f"pipecomp-rank-{rank}.pt"
