"""From what a user calls a model to a folder on this machine."""

from __future__ import annotations

from pathlib import Path

from expertly.core.errors import CheckpointError

_WANTED = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "LICENSE*", "NOTICE*")
_ACCEPTED = "a checkpoint folder, a packed store or a hub id"


def local_folder(model: str | Path) -> Path:
    """`model` itself where it is a folder; else the hub's model of that id, downloaded or from the hub's own cache.

    Raises CheckpointError saying why neither worked.
    """
    name = str(model)
    path = Path(model).expanduser()
    if name.strip() and path.is_dir():
        return path
    if name.strip() and path.exists():
        raise CheckpointError(f"model={name!r}: a file; must be {_ACCEPTED}")
    if isinstance(model, Path) or name.startswith((".", "/", "~")) or name.count("/") > 1 or not name.strip():
        raise CheckpointError(f"model={name!r}: no such folder; must be {_ACCEPTED}")
    return _download(name)


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(_WANTED), ignore_patterns=["*/*"]))
    except HFValidationError:
        reason = "not a hub id either (name or owner/name)"
    except GatedRepoError:
        reason = "the hub has it, but wants you to accept its terms and log in (hf auth login)"
    except LocalEntryNotFoundError:
        reason = "the hub cannot be reached, and its cache here does not have it"
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        reason = "the hub has no such model" if status in (401, 404) else f"the hub answers {status}"
    except Exception as error:  # whichever HTTP library the hub's client uses has errors of its own
        if not isinstance(error, OSError) and type(error).__module__.partition(".")[0].rstrip("2") != "httpx":
            raise
        reason = f"it could not be downloaded ({error})"
    raise CheckpointError(f"model={name!r}: no such folder here, and {reason}")
