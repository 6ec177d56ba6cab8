"""A trainer that evaluates and predicts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from transformers.trainer_utils import PredictionOutput

from pipecomp.errors import ConfigError
from pipecomp.trainer import alike
from pipecomp.trainer.evaluation import Evaluation
from pipecomp.trainer.feeding import EvalLoader, Samples, loader_options
from pipecomp.trainer.model_io import EngineTrainer


class EvaluatingTrainer(EngineTrainer):
    """A trainer with evaluate and predict."""

    # -- evaluation

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Metrics of a dataset, default the one given at the beginning; a dict of datasets is evaluated one by one.

        eval_dataset: or the name of one of several that were given. ignore_keys: None or empty, as there are only
        logits. Every rank must call this, and gets the metrics. compute_metrics is called on the first.
        """
        check_ignored("ignore_keys", ignore_keys)
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(chosen, str):
            given = self.eval_dataset if isinstance(self.eval_dataset, dict) else {}
            if chosen not in given:
                raise ConfigError("eval_dataset", chosen, f"a dataset, or one of {', '.join(given) or 'no names'}")
            chosen = given[chosen]
        if isinstance(chosen, dict) and "input_ids" not in chosen:
            out: dict[str, float] = {}
            for name, data in chosen.items():
                out |= self.evaluate(data, metric_key_prefix=f"{metric_key_prefix}_{name}")
            return out
        loss_only = self.compute_metrics is None or self.args.prediction_loss_only
        metrics = self._run_evaluation(chosen, "eval_dataset", metric_key_prefix, loss_only, arrays=False).metrics or {}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Logits, labels and metrics of a dataset, with or without labels; every rank must call this, and gets all."""
        check_ignored("ignore_keys", ignore_keys)
        output = self._run_evaluation(
            test_dataset, "test_dataset", metric_key_prefix, self.args.prediction_loss_only, arrays=True
        )
        self.control = self.callback_handler.on_predict(self.args, self.state, self.control, output.metrics)
        return PredictionOutput(predictions=output.predictions, label_ids=output.label_ids, metrics=output.metrics)

    def _run_evaluation(self, data: Any, name: str, prefix: str, loss_only: bool, *, arrays: bool) -> Any:
        args, ranks = self.args, alike.all_ranks()
        with ranks.collective_errors():
            samples = self._samples(data, name)
            facts = alike.dataset_facts(samples, name)
        alike.check_arguments(ranks, args, **facts)
        engine = self.engine
        loader = self._eval_loader(data, samples)
        self.callback_handler.eval_dataloader = loader
        evaluation = Evaluation(
            engine,
            self.group,
            args,
            loss=self._loss.plain,
            compute_metrics=self.compute_metrics,
            preprocess=self.preprocess_logits_for_metrics,
            on_step=self._prediction_step,
        )
        return evaluation.run(loader, prefix, loss_only=loss_only, arrays=arrays)

    def _eval_loader(self, data: Any, samples: Samples) -> EvalLoader:
        """A loader of the dataset; one whose worker processes stay is kept for the next evaluation."""
        args = self.args
        key = (id(data), args.per_device_eval_batch_size)
        if key in self._eval_loaders:
            return self._eval_loaders[key][1]
        loader = EvalLoader(
            samples,
            args.per_device_eval_batch_size,
            self._data_seed,
            loader_options(args),
            drop_last=args.dataloader_drop_last,
            replicas=self.replicas,
            replica=self.engine.grid.data_parallel_id,
        )
        if args.dataloader_persistent_workers:
            self._eval_loaders[key] = (data, loader)  # with the data, so that nothing else gets its id
        return loader

    def _prediction_step(self) -> None:
        self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)

    def _evaluate(self, *, step_schedule: bool = True) -> dict[str, float]:
        """Evaluation within training; schedules that follow a metric step after it."""
        metrics = self.evaluate()
        if step_schedule and self._follows_metric:
            self.lr_scheduler.step(self._metric(metrics))
        return metrics

    @property
    def _follows_metric(self) -> bool:
        """Whether the schedule steps after evaluations, by a metric."""
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
        return isinstance(self.lr_scheduler, plateau) or type(self.lr_scheduler).__name__ == "GreedyLR"

    def _metric(self, metrics: dict[str, float]) -> float:
        name = str(self.args.metric_for_best_model)
        key = name if name.startswith("eval_") else f"eval_{name}"
        if key not in metrics:
            raise ConfigError("metric_for_best_model", name, f"one of {', '.join(sorted(metrics))}")
        return metrics[key]

    def _new_best(self, metrics: dict[str, float]) -> bool:
        """Whether this is the best evaluation so far, which `state` then says."""
        if self.args.metric_for_best_model is None:
            return False
        value, state = self._metric(metrics), self.state
        worst, better = (-math.inf, np.greater) if self.args.greater_is_better else (math.inf, np.less)
        if not better(value, worst if state.best_metric is None else state.best_metric):
            return False
        state.best_metric = value
        if self.args.save_strategy != "no":
            state.best_global_step = state.global_step
        return True

    @property
    def _data_seed(self) -> int:
        return int(self.args.seed if self.args.data_seed is None else self.args.data_seed)


def check_ignored(name: str, keys: Any) -> None:
    """Trainer leaves these of a model's outputs out; the last stage gives logits only."""
    if keys:
        raise ConfigError(name, keys, "None: a pipeline's last stage gives logits and nothing else")
