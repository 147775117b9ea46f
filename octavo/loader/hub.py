"""Fetching models from the Hugging Face hub: JSON files, tokenizers and safetensors, never executable files."""

from __future__ import annotations

from pathlib import Path

from octavo.core.errors import DownloadError, ModelNotFoundError, UnsupportedModelError

_WANTED = ["*.json", "*.safetensors", "*.jinja", "merges.txt", "tokenizer.model", "*.tiktoken"]
#: Copies of the weights in other layouts, which many repositories have.
_UNWANTED = ["consolidated*", "*/*.safetensors", "*/*.json"]
_WEIGHTS = ["*.safetensors", "*.safetensors.index.json"]


def fetch_hub(repo: str, *, revision: str | None = None, progress: bool = True, weights: bool = True) -> Path:
    """The folder of a snapshot; an earlier download is used if the hub cannot be reached.

    Without ``weights`` only configuration and tokenizer files are fetched.

    ``HF_HUB_OFFLINE``, ``HF_TOKEN``, ``HF_ENDPOINT`` and ``HF_HOME`` have their meaning in huggingface_hub.

    Raises:
        ModelNotFoundError: no such repository or revision.
        DownloadError: not authorised, or neither reachable nor downloaded before.
        UnsupportedModelError: there is no config.json, or, with ``weights``, no safetensors beside it.
    """
    advice = f"; {gguf_advice(repo)}" if "gguf" in repo.lower() else ""
    try:
        folder = _snapshot(repo, revision, progress, _UNWANTED if weights else [*_UNWANTED, *_WEIGHTS])
    except DownloadError as e:
        raise DownloadError(f"{e}{advice}") from e
    if not (folder / "config.json").is_file():
        raise UnsupportedModelError(f"the hub repository {repo!r} has no config.json; {gguf_advice(repo)}")
    if weights and not any(folder.glob("*.safetensors")):
        raise UnsupportedModelError(
            f"the hub repository {repo!r} has no *.safetensors weights (pickled weights are never loaded: convert "
            "them with transformers' from_pretrained(NAME).save_pretrained(FOLDER)), or they were not fetched when the "
            f"hub could be reached (load_format='dummy' needs none){advice}"
        )
    return folder


def gguf_advice(repo: str, kind: str = "Q4_K_M") -> str:
    """What to do with a hub repository of GGUF files, which are not fetched: one of many is wanted."""
    command = f"hf download {repo} --include '*{kind}*.gguf' --local-dir ."
    return f"download one of its GGUF files ({command}) and give the path of the file"


def _snapshot(repo: str, revision: str | None, progress: bool, unwanted: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    shown_before = not are_progress_bars_disabled()
    if not progress:
        disable_progress_bars()
    at = f" at revision {revision!r}" if revision else ""
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=_WANTED, ignore_patterns=unwanted))
    except GatedRepoError as e:
        raise DownloadError(
            f"the hub model {repo!r} asks for consent: accept its terms on its page, then set HF_TOKEN"
        ) from e
    except RevisionNotFoundError as e:
        raise ModelNotFoundError(f"the hub model {repo!r} has no revision {revision!r}") from e
    except RepositoryNotFoundError as e:
        raise ModelNotFoundError(
            f"the hub has no model {repo!r}, or it is private (then set HF_TOKEN to a token that may read it)"
        ) from e
    except HFValidationError as e:
        raise ModelNotFoundError(f"{repo!r} is no valid hub id: {e}") from e
    except LocalEntryNotFoundError as e:
        raise DownloadError(
            f"the hub model {repo!r}{at} is not on this machine, and the hub cannot be reached (no network, or "
            "HF_HUB_OFFLINE is set); nor is there a folder of this name"
        ) from e
    except Exception as e:  # the HTTP library's errors differ between versions of huggingface_hub
        reason = str(e).strip().splitlines() or [""]
        raise DownloadError(f"the hub model {repo!r}{at} could not be fetched: {type(e).__name__}: {reason[0]}") from e
    finally:
        if not progress and shown_before:
            enable_progress_bars()
