"""Models of the Hugging Face Hub: fetched into Hugging Face's own cache, every failure with its cure."""

from __future__ import annotations

import re
from pathlib import Path

from ..errors import ModelError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
"""`owner/name`, or the bare name of one of the oldest models."""

WANTED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
UNWANTED = ["*/*", "consolidated*"]
"""Folders hold other formats (onnx, original); `consolidated` files are a second copy of the weights."""


def fetch(
    repo: str,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    offline: bool | None = None,
) -> Path:
    """The local folder of the Hub model `repo`.

    Args:
        repo: as `owner/name`.
        revision: branch, tag or commit; None is the main branch.
        token: of the Hub; None uses the one of `hf auth login` or $HF_TOKEN.
        offline: True uses only what is in the cache; None follows $HF_HUB_OFFLINE.

    Raises:
        ModelError: unknown or gated repository, unknown revision, no network, not in the cache.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    offline = constants.HF_HUB_OFFLINE if offline is None else offline
    try:
        return Path(
            snapshot_download(
                repo,
                revision=revision,
                token=token,
                local_files_only=offline,
                allow_patterns=WANTED,
                ignore_patterns=UNWANTED,
            )
        )
    except LocalEntryNotFoundError as error:
        raise (_missing(repo, revision) if offline else _unreachable(repo, error)) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise explain(error, repo, revision) from error


def explain(error: Exception, repo: str, revision: str | None = None) -> ModelError:
    """The Hub's `error` for `repo`, in afina's words."""
    from huggingface_hub.errors import (
        GatedRepoError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, OfflineModeIsEnabled):
        return _missing(repo, revision)
    if isinstance(error, GatedRepoError):
        return ModelError(
            "the model is gated: its owner wants your consent first",
            got=repo,
            wanted="a token of an account that has been granted access",
            cure=f"ask at https://huggingface.co/{repo}, then `hf auth login` or --token (in Python token=…)",
        )
    if isinstance(error, RevisionNotFoundError):
        return ModelError(
            "the model has no such revision",
            got=f"{repo} at {revision}",
            wanted="a branch, tag or commit of it",
            cure=f"see https://huggingface.co/{repo}/tree/main, or leave the revision out",
        )
    if isinstance(error, RepositoryNotFoundError):
        return ModelError(
            "no such folder or file here, and no such model on the Hugging Face Hub, or it is private",
            got=repo,
            wanted="a folder, a .gguf file, a demo name (`afina models list`) or a hub id owner/name",
            cure="check the spelling; for a private model `hf auth login` or --token (in Python token=…)",
        )
    return _unreachable(repo, error)


def _missing(repo: str, revision: str | None) -> ModelError:
    return ModelError(
        "no such folder or file here, and no such model in Hugging Face's cache, where offline mode looks",
        got=repo if revision is None else f"{repo} at {revision}",
        wanted="a folder, a .gguf file, or a model of the hub that was fetched before",
        cure=f"check the spelling; or once, with a network and without HF_HUB_OFFLINE: afina models get {repo}",
    )


def _unreachable(repo: str, error: Exception) -> ModelError:
    return ModelError(
        "no such folder or file here, and the Hugging Face Hub did not give such a model",
        got=f"{repo}: {type(error).__name__}: {error}",
        wanted="an answer from the Hub, or the model in Hugging Face's cache",
        cure="check the network, or use a folder, a .gguf file or a demo name (`afina models list`)",
    )
