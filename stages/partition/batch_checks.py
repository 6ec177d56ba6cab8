"""What a micro-batch has to be like for a Hugging Face model in stages: errors that name the sample.

Tensors of a GPU are not looked at but where a caller says so, since that would wait for it. B micro-batch, S tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipecomp.errors import DataError
from pipecomp.stages.link.boundary import Layout
from pipecomp.stages.partition import losses
from pipecomp.stages.partition.architectures import Head


class BatchChecks:
    """What one stage can tell of its micro-batches; each method raises DataError.

    Args:
        model: The stage's.
        name: Class of the unsplit model.
        head: Of that class.
        cut: Whether there are several stages.
        is_first: Whether this is the first, which has the embeddings.
    """

    def __init__(self, model: Any, name: str, head: Head, *, cut: bool, is_first: bool) -> None:
        self._config, self._name, self._head, self._cut = model.config, name, head, cut
        self._tokens = self._types = self._positions = None
        if is_first:
            self._tokens = model.get_input_embeddings().weight.shape[0]
            self._types = _rows_of(model, "token_type_embeddings")
            self._positions = _rows_of(model, "wpe", "position_embeddings")

    def length(self, tokens: int) -> None:
        """Check that there is a position for each token of a sample."""
        if self._positions is not None and tokens > self._positions:
            most = self._positions
            raise DataError(f"a sample of {tokens} tokens: {self._name} has {most} positions, so cut it to {most}")

    def tokens(self, ids: Sequence[int], inputs: Mapping[str, Tensor]) -> None:
        """Check that tokens and their types have embeddings: torch calls it an index out of range."""
        for key, what, known in (
            ("input_ids", "token", self._tokens),
            ("token_type_ids", "token type", self._types),
        ):
            given_BS = inputs.get(key)
            if given_BS is None or known is None or given_BS.device.type != "cpu":
                continue
            wrong_BS = (given_BS < 0) | (given_BS >= known)
            if bool(wrong_BS.any()):
                row, place = wrong_BS.nonzero()[0].tolist()
                raise DataError(
                    f"sample {ids[row]} has the {what} {int(given_BS[row, place])} at place {place}; this "
                    f"{self._name} has embeddings of {known} {what}s: from 0 to {known - 1}"
                )

    def padding(self, layout: Layout) -> None:
        """Check that there is a token where a head for classes reads; links carry no padding."""
        reads_one = self._head.reads_first_token or self._head.pools_last_token
        if reads_one and self._cut and not all(layout.counts):
            raise DataError(
                f"sample {layout.ids[layout.counts.index(0)]} has no tokens, its attention_mask is 0 everywhere: "
                f"{self._name} would compute its classes from padding, which links do not carry"
            )
        if self._head.reads_first_token and self._cut and any(layout.starts):
            sample = layout.ids[next(i for i, start in enumerate(layout.starts) if start)]
            raise DataError(
                f"sample {sample} is padded on the left, but {self._name} reads a batch's first place: pad on the "
                "right (padding_side='right')"
            )

    def last_tokens(self, given: Mapping[str, Tensor | None], ids: Sequence[int] | None = None) -> None:
        """Check that the mask, by which the last stage pools, and `pad_token_id`, by which the model does, agree.

        ids: of the samples, where `given` is as it was loaded. Without them tensors of a GPU are not compared.
        """
        ids_BS, pad = given["input_ids"], self._config.pad_token_id
        assert ids_BS is not None, "checked before"
        if pad is None:
            if ids_BS.shape[0] != 1:
                raise DataError(f"{self._name} needs config.pad_token_id for more than one sample at a time")
            return
        if ids is None and ids_BS.device.type != "cpu":
            return
        by_pad_B = last_places(ids_BS != pad)
        mask_BS = given.get("attention_mask")
        by_mask_B = last_places(torch.ones_like(ids_BS) if mask_BS is None else mask_BS.to(ids_BS.device))
        if not torch.equal(by_pad_B, by_mask_B):
            row = int((by_pad_B != by_mask_B).nonzero()[0])
            sample = row if ids is None else ids[row]
            raise DataError(
                f"sample {sample}: by attention_mask its last token is {int(by_mask_B[row])}, by pad_token_id {pad} it "
                f"is {int(by_pad_B[row])}; {self._name} classifies the last token, so give a mask that is 0 exactly on "
                "padding, and a pad_token_id that no sample ends with"
            )

    def labels(self, layout: Layout, labels: Tensor) -> None:
        """Check that labels are classes of the model, none of which would be predicted from padding.

        An unsplit model's loss has terms for padding where input_ids are copied to labels as they are; the last of
        several stages has no hidden states to predict it from. labels: [B, S] or [B, ...].
        """
        following = int(self._head.loss is losses.causal_lm)  # places from a label to the token that predicts it
        by_token = following or self._head.loss is losses.masked_lm
        if by_token:
            self._classes(layout.ids, labels[..., following:], "vocab_size", first=following)
        elif self._head.loss in (losses.classification, losses.deberta_classification):
            self._classes(layout.ids, labels, "num_labels")
        mask_BS = layout.mask_BS(labels.device)
        if mask_BS is None or not self._cut or not by_token or labels.shape != mask_BS.shape:
            return
        wanted, read = labels[:, following:], mask_BS[:, : labels.shape[1] - following]
        wrong = (wanted != -100) & (read == 0)
        if bool(wrong.any()):
            row, place = wrong.nonzero()[0].tolist()
            raise DataError(
                f"labels: sample {layout.ids[row]} has {int(wanted[row, place])} at place {place + following}, to be "
                "predicted from padding, which links do not carry; allowed: -100 where attention_mask is 0, as "
                "DataCollatorForLanguageModeling makes them"
            )

    def _classes(self, ids: Sequence[int], labels: Tensor, number: str, first: int | None = None) -> None:
        """Check classes, of which torch calls one that is too high a target out of bounds.

        number: what of the config is their number. first: place of the first label of a sample that has several.
        """
        config, classes = self._config, int(getattr(self._config, number))
        if labels.is_floating_point() or labels.device.type != "cpu":
            return
        problem = "" if first is not None else config.problem_type or losses.guess_problem(classes, labels)
        if problem not in ("", "single_label_classification"):
            return
        wrong = labels >= classes
        if self._head.loss is not losses.deberta_classification or config.problem_type:  # it ignores them
            wrong |= (labels < 0) & (labels != -100)
        if bool(wrong.any()):
            row, *place = wrong.nonzero()[0].tolist()
            at = "" if first is None else f" at place {place[0] + first}"
            raise DataError(
                f"labels: sample {ids[row]} has {int(labels[wrong][0])}{at}; this {self._name} has {classes} classes "
                f"({number} of its config): from 0 to {classes - 1}, and -100 for no label"
            )


def last_places(mask_BS: Tensor) -> Tensor:
    """Give the last place of each sample where a mask is not 0, int64 [B]; 0 where it is 0 everywhere."""
    places_S = torch.arange(mask_BS.shape[1], device=mask_BS.device, dtype=torch.int32)
    return (places_S * (mask_BS != 0).to(torch.int32)).argmax(-1)


def _rows_of(model: Any, *endings: str) -> int | None:
    """Count the rows of learned embeddings, by how their names end; None where a model has none.

    Beyond them torch finds no embedding. Those up to the padding's are no positions, as RoBERTa counts.
    """
    for name, module in model.base_model.named_modules():
        if name.endswith(endings) and isinstance(module, nn.Embedding):
            return module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
    return None
