"""Upload of the trained model to the Hugging Face hub, without which a training continues."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from pipecomp.distributed.preemption import say_here

_LEFT_OUT = ["_*", f"{PREFIX_CHECKPOINT_DIR}-*", "messages/*"]  # of the model's folder
_SHOWN = 300  # characters of an error


class HubRepository:
    """The repository of a trainer's model, for rank 0, on whose machine the model's folder is complete.

    A failing hub is reported in one line and does not end the run.

    Args:
        args: TrainingArguments.

    Attributes:
        id: The repository's id; None before it is created.
    """

    def __init__(self, args: Any) -> None:
        self._args = args
        self.id: str | None = None

    def create(self, token: str | None = None, private: bool | None = None) -> None:
        """Create the repository, if it does not exist."""
        self._attempt("there is no repository yet", lambda: self._create(token, private))

    def upload(
        self,
        message: str,
        *,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        blocking: bool = True,
    ) -> Any:
        """Upload `args.output_dir` without checkpoints.

        Returns:
            huggingface_hub's commit, or a future of it without `blocking`; None if the hub fails.
        """
        args = self._args

        def act() -> Any:
            if self.id is None:
                self._create(token, private)
            assert self.id is not None
            return HfApi().upload_folder(  # type: ignore[call-overload]  # by a bool that is known here only
                repo_id=self.id,
                folder_path=args.output_dir,
                commit_message=message,
                token=token or args.hub_token,
                revision=revision or args.hub_revision,
                ignore_patterns=_LEFT_OUT,
                run_as_future=not blocking,
            )

        return self._attempt(f"the model is in {args.output_dir} and not on the hub", act)

    def _create(self, token: str | None, private: bool | None) -> None:
        args = self._args
        name = args.hub_model_id or Path(args.output_dir).absolute().name
        private = args.hub_private_repo if private is None else private
        url = HfApi().create_repo(name, token=token or args.hub_token, private=private, exist_ok=True)
        self.id = str(url.repo_id)

    def _attempt(self, consequence: str, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except Exception as error:  # of the network, the server, or the token
            why = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:_SHOWN]
            say_here(f"push_to_hub: {consequence} ({why}); the run continues")
            return None
