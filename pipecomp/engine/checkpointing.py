"""Saving and loading a run: DeepSpeed's checkpoint and, beside its files, the state that it does not know.

TAG/   DeepSpeed's checkpoint
    pipecomp-rank-N.pt                     random generators of a rank, and the versions in its message stores
    pipecomp-messages-rank-N/data.mdb      its stores, with store.in_checkpoints
    pipecomp-gradients-…-rank-N            error-feedback residuals of compressed gradients
    pipecomp-local-steps-stage-S-replica-R.pt   a replica's own weights and optimizer states, with local steps
    pipecomp-seal-R.json                   manifest, written last, see `checkpoint.manifest`
latest   DeepSpeed's file with the last complete TAG

N is the state's number, of its stage and replica (`pipecomp.rank_layout`), so that ranks in another order find it.

A record of the second home has the same files without message stores (`pipecomp.elastic`).
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from pipecomp.checkpoint import manifest, reshard
from pipecomp.checkpoint.run_id import RunIdentity
from pipecomp.checkpoint.writing import (
    CollectingCheckpointEngine,
    CollectiveWrite,
    RecordingCheckpointEngine,
    private_files,
    random_state,
    set_random_state,
    write_state,
)
from pipecomp.config import Config
from pipecomp.config.activations import FEWEST, bits_text, plain_bits
from pipecomp.data import PackedSampler, ShardedSampler
from pipecomp.distributed.collectives import broadcast, gathered
from pipecomp.distributed.consistency import AllRanks
from pipecomp.elastic.record import SHARED, check_plain, is_file_name
from pipecomp.elastic.second_home import RankState, SecondHome
from pipecomp.engine.failure import FailureGuard
from pipecomp.engine.local_steps import LocalTraining
from pipecomp.engine.reduction import GradientReduction, load_residuals, residuals_file, save_residuals
from pipecomp.errors import CheckpointError, ConfigError, PipecompError, StoreError, WireError, require
from pipecomp.interfaces import EngineState, ResumeState, StageContext, TrainingProgress
from pipecomp.optim import QuantizedAdam
from pipecomp.optim.adam import thaw
from pipecomp.stages.link.handshake import summarize
from pipecomp.utils.files import atomic_write_text

STATE_KEY = "pipecomp"

_log = logging.getLogger(__name__)


@dataclass
class CheckpointManager:
    """Saves and loads everything that a run needs to continue; every rank calls the same methods.

    Attributes:
        run: Owner of the cached activations, once the links are open; None if none are cached.
        second_home: Where records go; None for no records.
        trainer_state: Returns a trainer's files in a checkpoint of the last step; None without a trainer.
        description: Description of the pipeline.
    """

    context: StageContext
    engine: EngineState
    gradients: GradientReduction
    local: LocalTraining | None
    guard: FailureGuard
    run: RunIdentity | None = None
    second_home: SecondHome | None = None
    trainer_state: Callable[[], RankState] | None = None
    description: dict[str, Any] = field(default_factory=dict)

    def _all_ranks(self) -> AllRanks:
        return AllRanks(missed=self.guard.missed)

    def _warn(self, message: str, *args: object) -> None:
        if self.context.rank == 0:
            _log.warning(message, *args)

    # -- saving

    def check_precision(self) -> None:
        """Raise ConfigError for bf16 without ZeRO: DeepSpeed 0.19 cannot load what it would save."""
        loadable = not self.engine.using_bf16_optimizer or self.engine.zero_optimization()
        allowed = "1, with data_types.grad_accum_dtype 'fp32', for checkpoints of bf16 training"
        hint = "DeepSpeed cannot load what it saves without ZeRO."
        require(loadable, "zero_optimization.stage", 0, allowed, hint)

    def warn_of_precision(self) -> None:
        """Log at the start what `check_precision` would raise after hours of training."""
        try:
            self.check_precision()
        except ConfigError as error:
            self._warn("this run cannot save checkpoints (save_pretrained works): %s", error)

    def check_state(self, client_state: dict | None) -> None:
        """Raise ConfigError for a key of the caller's state that the checkpoint uses, or that a record cannot have."""
        for key in client_state or {}:
            free = key not in reshard.RESERVED_KEYS and key != STATE_KEY
            require(free, "client_state", key, "keys that the checkpoint does not use itself")
        if self.second_home is not None:
            try:
                check_plain(client_state)
            except TypeError as error:
                allowed = f"plain values with elastic.second_home ({error})"
                raise ConfigError("client_state", list(client_state or {}), allowed) from error

    def save(self, save_dir: str, tag: Any, client_state: dict | None, *, latest: bool, stock: Callable) -> Any:
        """Save a checkpoint, see `PipelineEngine.save_checkpoint`. stock: DeepSpeed's own `save_checkpoint`.

        Raises:
            CheckpointError: On every rank, if one of them cannot write. No part of the checkpoint remains.
        """
        engine, rank = self.engine, self.context.rank
        tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
        folder = Path(save_dir) / tag
        self._describe()
        position = broadcast(self._position())  # rank 0 has data if any rank has
        state = {**(client_state or {}), STATE_KEY: self._own_state(position)}
        first_here = os.environ.get("LOCAL_RANK", "0") == "0"
        write = CollectiveWrite(folder)
        writer = engine.checkpoint_engine
        engine.checkpoint_engine = RecordingCheckpointEngine(writer, write)
        try:
            with private_files():
                write.attempt(lambda: folder.mkdir(parents=True, exist_ok=True))
                write.attempt(lambda: manifest.clear(folder))
                write.raise_problems()
                with engine.common_weights():
                    done = stock(save_dir, tag=tag, client_state=state, save_latest=False)
                if self.local is not None:
                    local = self.local
                    write.attempt(lambda: local.save(folder))
                write.attempt(lambda: save_residuals(self.gradients.states(), folder, self.context.state_number))
                write.attempt(lambda: self._save_rank(folder))
                write.raise_problems()  # all files are written
                if first_here:
                    write.attempt(lambda: manifest.write(folder, rank))
                write.raise_problems()
                if latest and rank == 0:
                    write.attempt(lambda: atomic_write_text(Path(save_dir) / "latest", tag))
                write.raise_problems()  # after this the caller may delete older checkpoints
            if self.second_home is not None:
                self._send_record(folder, client_state)
        except CheckpointError:
            if first_here:
                manifest.remove(folder)
                shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            engine.checkpoint_engine = writer
        return done

    def prepare_records(self) -> None:
        """Raise ConfigError if this run cannot save; every rank must call this before `state_of_rank`."""
        self.check_precision()
        self._describe()

    def state_of_rank(self, folder: str | None = None, client_state: dict | None = None) -> RankState:
        """Collect the files of this rank's checkpoint in memory, without message stores and without collectives.

        Args:
            folder: Name of the checkpoint's folder; None for a name with the step.
            client_state: See `save`. What the files of all stages have in common, rank 0's record has alone.
        """
        engine, number = self.engine, self.context.state_number
        outer = RankState(files={}, folder=folder or f"global_step{engine.global_steps}")
        if self.trainer_state is not None:
            outer = self.trainer_state()
        files: dict[str, Any] = {}
        writer, engine.checkpoint_engine = engine.checkpoint_engine, CollectingCheckpointEngine(files)
        try:
            with engine.common_weights():
                engine.collect_checkpoint()
        finally:
            engine.checkpoint_engine = writer
        if self.local is not None:
            files |= self.local.files()
        files |= {residuals_file(name, number): state.state_dict() for name, state in self.gradients.states()}
        files[rank_file(Path(), number).name] = {"random": random_state(), "messages": self._stored_versions()}
        if outer.engine:
            files = {f"{outer.engine}/{name}": content for name, content in files.items()}
        if self.context.rank == 0:
            files[SHARED] = {**(client_state or {}), STATE_KEY: self._own_state(self._position())}
        return RankState(files={**files, **outer.files}, folder=outer.folder, engine=outer.engine)

    def _send_record(self, folder: Path, client_state: dict | None) -> None:
        """Send the state that was saved to the second home."""
        assert self.second_home is not None
        name = folder.name if is_file_name(folder.name) else None
        take = partial(self.state_of_rank, name, client_state)
        self.second_home.save(self.engine.global_steps, folder, take, again=bool(client_state))

    def _describe(self) -> None:
        """Describe the pipeline; every rank must call this."""
        self.description = asdict(reshard.describe(self.engine))

    def _own_state(self, position: dict[str, Any] | None) -> dict[str, Any]:
        """This package's state in the file of every stage. position: in the training data."""
        engine, configured = self.engine, self.context.settings
        own: dict[str, Any] = asdict(engine.progress)
        if self.run is not None:
            own["run"] = self.run.id
        own["pipeline"] = self.description
        own["per_epoch"] = engine.micro_batches_per_epoch
        own["position"] = position
        own["data"] = engine.data_facts
        if any(configured.activations.measured(key) for key in FEWEST):
            own["bits"] = [_bits(configured), _bits(engine.pipecomp_config)]
        if self.local is not None:
            own["local_steps"] = self.local.outer.stats()
        return own

    def _position(self) -> dict[str, Any] | None:
        """The place in the training data for a run of any layout; None without data, or in an order of their own."""
        sampler = None if self.engine.loader is None else self.engine.loader.sampler
        if not isinstance(sampler, (ShardedSampler, PackedSampler)):
            return None
        return asdict(sampler.position(self.engine.progress.batches_taken))

    def _save_rank(self, folder: Path) -> None:
        environment, copied = self.engine.links.environment, False
        if environment is not None and self.context.settings.store.in_checkpoints:
            copied = environment.save(manifest.messages_copy(folder, self.context.state_number))
        state = {"random": random_state(), "messages": self._stored_versions()}
        write_state(state, rank_file(folder, self.context.state_number))
        if self.run is not None:
            self.run.set_checkpoint(copied=copied)

    # -- loading

    def load(self, load_dir: str, tag: Any, options: reshard.LoadOptions, *, stock: Callable) -> tuple[Any, Any]:
        """Load a checkpoint, see `PipelineEngine.load_checkpoint`. stock: DeepSpeed's own `load_checkpoint`."""
        # Rank 0 has written `latest`; without a shared disk other machines do not have it.
        tag = check_tag(broadcast(_latest(load_dir))) if tag is None else str(tag)
        if tag is None:
            _log.warning("%s has no file 'latest': there is no checkpoint to load", load_dir)
            return None, None
        folder = Path(load_dir) / tag
        try:
            return self._load(folder, options, stock)
        except PipecompError:
            raise
        except Exception:  # torch and pickle do not name a truncated file
            problem = manifest.problem(folder) if manifest.finished(folder) else None
            require(problem is None, "load_dir", str(folder), f"a whole checkpoint: {problem}")
            raise

    def _load(self, folder: Path, options: reshard.LoadOptions, stock: Callable) -> tuple[Any, Any]:
        engine, local = self.engine, self.local
        self._check_finished(folder)
        if local is not None:
            local.outer.arrive()  # loading residuals uses a group that an average may still be using
        with_optimizer = options["load_optimizer_states"] and not options["load_module_only"]
        saved = reshard.open_if_resharded(engine, folder, STATE_KEY, with_optimizer=with_optimizer)
        if saved is None:
            # With an adapter, frozen weights are not in the files.
            strict = options["load_module_strict"] and self.context.stage.adapter is None
            path, state = stock(str(folder.parent), folder.name, **{**options, "load_module_strict": strict})
        elif options["custom_load_fn"] is not None:
            hint = "The stages of a pipeline load themselves."
            raise ConfigError("custom_load_fn", options["custom_load_fn"], "None", hint)
        else:
            path, state = reshard.load(engine, saved, options)
        if path is None:
            return path, state
        if with_optimizer:
            self._adapt_optimizer()
        own = (state or {}).pop(STATE_KEY, None)
        if options["load_module_only"]:
            if local is not None:
                local.outer.forget()
            return path, state
        here = (list(self.context.plan.cuts), self.context.replicas)
        same = own is None or (own["pipeline"]["cuts"], own["pipeline"]["replicas"]) == here
        if same:
            with self._all_ranks().collective_errors():
                load_residuals(self.gradients.states(), folder, self.context.state_number, self.context.device)
        else:
            states = dict(self.gradients.states())
            for compressed in states.values():
                compressed.forget()
            if states:
                self._warn("%s is of another pipeline: gradient methods start without residuals", folder)
        self._load_local(own or {}, folder, same=same, with_optimizer=options["load_optimizer_states"])
        if own is not None:
            if same:
                self._set_saved_bits(own.get("bits"), folder)
            self._resume(own, folder, same)
        return path, state

    def _adapt_optimizer(self) -> None:
        """Continue the loaded optimizer states with this run's settings and kind of optimizer."""
        engine = self.engine
        optimizer = cast(Any, engine.optimizer)  # DeepSpeed's optimizers have no common type
        if engine.zero_optimization():
            optimizer.clip_grad = engine.gradient_clipping()  # DeepSpeed restores the checkpoint's
            if not engine.zero_load_from_fp32_weights():
                optimizer.refresh_fp32_params()  # DeepSpeed leaves the masters of the new model
        elif not isinstance(optimizer, QuantizedAdam):
            thaw(optimizer)

    def _check_finished(self, folder: Path) -> None:
        """Raise ConfigError for a missing or unfinished checkpoint."""
        with self._all_ranks().collective_errors():
            require(folder.is_dir(), "load_dir", str(folder), "a checkpoint's folder on the machine of every rank")
            state = reshard.read_state(folder)
        # One manifest on any machine vouches for all ranks. DeepSpeed's own checkpoints have none.
        answers = gathered((state is None or STATE_KEY in state, manifest.finished(folder)))
        whole = any(finished for _, finished in answers) or not all(ours for ours, _ in answers)
        hint = "This one has no manifest. Give the tag of another."
        require(whole, "load_dir", str(folder), "a finished checkpoint", hint)

    def _load_local(self, own: dict[str, Any], folder: Path, *, same: bool, with_optimizer: bool) -> None:
        saved, step = own.get("local_steps"), self.engine.global_steps
        if self.local is not None:
            pipeline = None if saved is None else own["pipeline"]
            with self._all_ranks().collective_errors():
                self.local.load(folder, pipeline, step, same=same, with_optimizer=with_optimizer)
        elif saved is not None and saved["averaged_at"] < step:
            averaged = saved["averaged_at"]
            self._warn("%s has local steps, which are dropped: weights are those after step %d", folder, averaged)

    def _set_saved_bits(self, saved: list[dict[str, Any]] | None, folder: Path) -> None:
        """Use the bits that the run measured when it began, if its settings are the same: losses depend on them."""
        engine = self.engine
        if saved is None or saved[0] != _bits(self.context.settings) or saved[1] == _bits(engine.pipecomp_config):
            return
        a = engine.pipecomp_config.activations.replace(**saved[1])
        engine.set_bits(engine.pipecomp_config.replace(activations=a))
        bits = f"{bits_text(a.forward_bits)} forward, {bits_text(a.backward_bits)} back"
        self._warn("bits: %s, from %s instead of this start's measurement", bits, folder)

    def _resume(self, own: dict[str, Any], folder: Path, same: bool) -> None:
        """Continue in the data, and restore random generators and cached activations where possible."""
        engine = self.engine
        engine.progress = TrainingProgress(self._batches_taken(own), own["evaluations"])
        engine.seek_loader()
        file = rank_file(folder, self.context.state_number)
        saved = torch.load(file, weights_only=True) if same and file.is_file() else None
        if saved is not None:
            set_random_state(saved["random"])
        if self.run is None:
            return
        all_ranks = self._all_ranks()
        exact, differing = False, self._differing_data(own.get("data", {}))
        with all_ranks.collective_errors():
            self.run.load(own.get("run"))
            self.run.set_checkpoint(copied=manifest.messages_copy(folder, self.context.state_number).is_dir())
            if differing:
                engine.links.forget()
            elif saved is not None:
                exact = self._restore_messages(folder, saved["messages"])
        if differing:
            text = "cached activations belong to other samples and are dropped; every sample is a first visit"
            self._warn("%s is of other training data (%s): %s", folder, ", ".join(differing), text)
        dropped = engine.links.reconcile_stores()
        engine.resumed = ResumeState(all(all_ranks.all_gather_object(exact and not dropped)), dropped)

    def _differing_data(self, saved: dict[str, Any]) -> list[str]:
        """Facts of the training data that differ on any rank (only some load data); every rank must call this."""
        if self.context.settings.store.clusters is not None:  # cluster centers do not belong to samples
            return []
        facts = sorted(self.engine.data_facts.items())
        differ = [f"{key}: {own}, then {saved[key]}" for key, own in facts if saved.get(key, own) != own]
        return next(filter(None, gathered(differ)), [])

    def _batches_taken(self, own: dict[str, Any]) -> int:
        """The place in this run's data: in the same epoch, before the samples that were not taken yet."""
        engine, pipeline, per_epoch = self.engine, own["pipeline"], self.engine.micro_batches_per_epoch
        position = reshard.saved_position(own, engine.micro_batches)
        if position is not None and engine.loader is not None:
            sampler = engine.loader.sampler
            if isinstance(sampler, (ShardedSampler, PackedSampler)):
                return sampler.seek(position)
        other = (pipeline["replicas"], pipeline["micro_batch"]) != (self.context.replicas, engine.micro_batch_size)
        if other and engine.loader is not None and own["batches_taken"]:
            self._warn(
                "the checkpoint does not record which samples of its epoch were taken, or this run has an order of its "
                "own, and replicas or micro-batches differ: samples of the epoch may come twice or not at all"
            )
        epoch, place = 0, own["batches_taken"]
        if per_epoch is not None and own.get("per_epoch") is not None:
            epoch, place = divmod(place, own["per_epoch"])
        samples = place * pipeline["micro_batch"] * pipeline["replicas"]
        return epoch * (per_epoch or 0) + samples // (engine.micro_batch_size * self.context.replicas)

    def _restore_messages(self, folder: Path, versions: dict[str, Any]) -> bool:
        """Restore the cached activations of this rank from the checkpoint's copy; False if it has none."""
        if self._stored_versions() == versions:
            return True
        environment = self.engine.links.environment
        assert environment is not None
        copy = manifest.messages_copy(folder, self.context.state_number)
        if not environment.restore(copy):
            return False
        if self._stored_versions() != versions:
            raise StoreError(f"{copy} differs from what the checkpoint records; remove it to continue without")
        return True

    def _stored_versions(self) -> dict[str, Any]:
        """By link: the store's number of samples, their highest version, and a digest of all versions."""
        return {str(end.index): list(summarize(end.store)) for end in self.engine.links if end.store is not None}


def _latest(load_dir: str) -> str | None:
    latest = Path(load_dir) / "latest"
    return latest.read_text(encoding="utf-8").strip() if latest.is_file() else None


def check_tag(tag: Any) -> str | None:
    """Check that rank 0's tag names a folder below the checkpoints' folder, and return it.

    Raises:
        WireError: The tag names another folder. Files of a checkpoint are unpickled, so neither another rank nor a
            foreign file `latest` may choose the folder.
    """
    if tag is not None and (not isinstance(tag, str) or Path(tag).is_absolute() or ".." in Path(tag).parts):
        raise WireError(f"rank 0 names a checkpoint {tag!r}, allowed: a folder in that of the checkpoints")
    return tag


def _bits(config: Config) -> dict[str, Any]:
    """The bits of both directions as JSON values."""
    return {key: plain_bits(getattr(config.activations, key)) for key in FEWEST}


def rank_file(folder: Path, number: int) -> Path:
    """Return the path of a rank's own file in a checkpoint."""
    return folder / f"pipecomp-rank-{number}.pt"
