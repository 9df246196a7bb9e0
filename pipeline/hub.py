"""Checkpoints of the Hugging Face Hub: what is needed of a repository is fetched, checked, and found again offline.

The files lie where huggingface_hub puts them, so that every program that uses its cache shares them. What this adds:
only the needed files, all of one commit, sizes and shards verified, errors that name repository, file and remedy.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..configs.errors import AccessError, ArgumentError, CheckpointError, DownloadError, NetworkError, RepositoryError
from .files import complete_file
from .hub_files import (
    MODEL_INDEX,
    PARTS,
    Part,
    check_repo_id,
    hash_file,
    is_weights,
    needed_files,
    remove_cached,
    require_whole_weights,
    wrong_sizes,
)

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo, RepoSibling

logger = logging.getLogger(__name__)

DEFAULT_BRANCH = "main"
LOCK_SECONDS = 0.1
"""How long an orphan waits for its lock. One that is still being written is locked for as long as that takes."""


@dataclass(frozen=True)
class Snapshot:
    """Files of one commit of a repository, on this machine.

    Attributes:
        folder: where they lie, under their names in the repository.
        repo_id: the repository, "owner/name".
        commit: the full hash.
        files: the names of those that were asked for, with "/" between folders.
    """

    folder: Path
    repo_id: str
    commit: str
    files: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum((self.folder / name).stat().st_size for name in self.files)


@dataclass(frozen=True)
class _Request:
    repo_id: str
    revision: str | None
    parts: Mapping[str, Part]
    files: tuple[str, ...]
    cache_dir: Path
    token: str | None
    verify: bool

    @property
    def storage(self) -> Path:
        """The repository's folder in the cache."""
        from huggingface_hub.file_download import repo_folder_name

        return self.cache_dir / repo_folder_name(repo_id=self.repo_id, repo_type="model")

    @property
    def remedy(self) -> str:
        """What fetches it all."""
        if not self.parts:
            return "run the same once without --offline where there is a network"
        revision = f" --revision {self.revision}" if self.revision else ""
        return f"`python scripts/download.py {self.repo_id}{revision}` fetches it where there is a network"


def fetch(
    repo_id: str,
    *,
    revision: str | None = None,
    parts: Mapping[str, Part] = PARTS,
    files: Sequence[str] = (),
    cache_dir: str | os.PathLike | None = None,
    token: str | None = None,
    offline: bool = False,
    verify: bool = False,
    on_progress: Callable[[str], None] | None = None,
) -> Snapshot:
    """Fetch what is needed of a repository, or find it in the cache, and verify it.

    The file list is that of one commit, and names what is fetched and how long it is. Finished files are never
    fetched again, those of a wrong length are, with a warning; the leavings of runs that were killed are removed.
    Weights come one after the other, so that a broken run loses one file at most.

    Args:
        repo_id: "owner/name".
        revision: branch, tag or commit; None is the default branch.
        parts: what is needed of which folder ("" is the repository's root); the Diffusers layout by default.
        files: names of files that are needed beside the parts.
        cache_dir: the cache; None is huggingface_hub's own (HF_HOME, HF_HUB_CACHE).
        token: of an account that may read the repository; None is HF_TOKEN or the one that is logged in.
        offline: open no socket and take what the cache has; so does HF_HUB_OFFLINE=1.
        verify: compare the hash of every file with the Hub's record, not its size alone; not offline.
        on_progress: called with a line before each file of weights. Beside it the client shows its bars on a terminal.

    Raises:
        FileNotFoundError: if repository, revision or a file does not exist, or offline is not in the cache.
        PermissionError: if the Hub wants a token, or another one.
        ConnectionError: if the Hub cannot be reached or has a fault.
        ValueError: if a file is damaged (one that is not as the Hub records it is removed), or the id is not one.
        OSError: if a file cannot be fetched or written. Every message names the repository, and the remedy.
    """
    from huggingface_hub import is_offline_mode
    from huggingface_hub.constants import HF_HUB_CACHE

    check_repo_id(repo_id)
    cache = Path(HF_HUB_CACHE if cache_dir is None else cache_dir).expanduser().resolve()
    request = _Request(repo_id, revision, parts, tuple(files), cache, token, verify)
    if offline or is_offline_mode():
        if verify:
            raise ArgumentError(f"{repo_id} cannot be verified offline: the record of its hashes is on the Hub")
        return _find_in_cache(request)
    return _download(request, on_progress)


def fetch_file(repo_id: str, name: str, **kwargs: Any) -> Snapshot:
    """Fetch one file of a repository; it is `snapshot.folder / name`.

    Args:
        repo_id: "owner/name".
        name: of the file in the repository.
        kwargs: revision, cache_dir, token, offline, verify and on_progress, as of `fetch`.

    Raises:
        FileNotFoundError: and the other errors of `fetch`.
    """
    return fetch(repo_id, parts={}, files=(name,), **kwargs)


def _download(request: _Request, on_progress: Callable[[str], None] | None) -> Snapshot:
    info = _ask(request)
    assert info.sha is not None  # the API's answer has one for every revision
    records = {file.rfilename: file for file in info.siblings or []}
    sizes = {name: record.size for name, record in records.items() if record.size is not None}
    folder = request.storage / "snapshots" / info.sha
    _remove_wrong_sizes(request, folder, sizes)
    cached = {name: record for name, record in records.items() if (folder / name).is_file()}
    _verify(request, folder, cached)  # first: what is damaged could not be read below
    _get_small_files(request, folder, sizes)
    names = _needed(request, folder, sizes)  # by now model_index.json and the indexes of the shards are there
    _require_listed(request, folder, names, sizes)
    needed = {name: sizes[name] for name in names}
    _get_weights(request, folder, {name: size for name, size in needed.items() if is_weights(name)}, on_progress)
    _remove_and_raise(request, folder, wrong_sizes(folder, needed))
    _verify(request, folder, {name: records[name] for name in names if name not in cached})
    _require_whole_weights(request, folder)
    _remove_orphans(request.storage)
    _write_ref(request, info.sha)  # last: offline, an unfinished update leaves the commit before it in use
    return Snapshot(folder, request.repo_id, info.sha, tuple(names))


def _find_in_cache(request: _Request) -> Snapshot:
    commit = _cached_commit(request)
    folder = request.storage / "snapshots" / commit
    sizes = _cached_sizes(request, commit)
    names = _needed(request, folder, sizes or [path.relative_to(folder).as_posix() for path in folder.rglob("*")])
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        what = f"{', '.join(missing)} of {request.repo_id} at commit {commit}"
        raise RepositoryError(f"not in the cache {request.cache_dir}: {what}; {request.remedy}")
    if wrong := wrong_sizes(folder, {name: sizes[name] for name in names if name in sizes}):
        raise CheckpointError(f"{request.repo_id} in the cache {request.cache_dir}: {_listed(wrong)}; {request.remedy}")
    _require_whole_weights(request, folder)
    return Snapshot(folder, request.repo_id, commit, tuple(names))


def _ask(request: _Request) -> ModelInfo:
    """Return the revision's commit, and its files with their sizes and hashes."""
    from huggingface_hub import HfApi

    with _explained(request.repo_id, request.revision):
        return HfApi(token=request.token).model_info(request.repo_id, revision=request.revision, files_metadata=True)


def _needed(request: _Request, folder: Path, names: Collection[str]) -> list[str]:
    with _damage_named(request):
        return needed_files(folder, names, request.parts, request.files)


def _require_listed(request: _Request, folder: Path, names: Sequence[str], sizes: Mapping[str, int]) -> None:
    lacking = [name for name in names if name not in sizes]
    if lacking:
        layout = "; a repository in the Diffusers layout has it, another cannot be used here"
        raise RepositoryError(
            f"{request.repo_id} at commit {folder.name} on the Hub lacks {', '.join(lacking)}"
            f"{layout if MODEL_INDEX in lacking else '; another revision may have it'}"
        )


def _get_small_files(request: _Request, folder: Path, sizes: Mapping[str, int]) -> None:
    """Fetch several files at once; the client records the commit's file list beside them, for `_cached_sizes`."""
    from huggingface_hub import snapshot_download

    names = [name for name in _needed(request, folder, sizes) if name in sizes and not is_weights(name)]
    if names:
        at = {"revision": folder.name, "cache_dir": request.cache_dir, "token": request.token}
        with _explained(request.repo_id, folder.name):
            snapshot_download(request.repo_id, allow_patterns=[escape(name) for name in names], **at)


def _get_weights(
    request: _Request, folder: Path, sizes: Mapping[str, int], on_progress: Callable[[str], None] | None
) -> None:
    from huggingface_hub import hf_hub_download

    at = {"revision": folder.name, "cache_dir": request.cache_dir, "token": request.token}
    done, total = 0, sum(sizes.values())
    for number, (name, size) in enumerate(sizes.items(), start=1):
        if on_progress is not None and not (folder / name).is_file():
            after = f"{number} of {len(sizes)}, after {done / 1e9:.2f} of {total / 1e9:.2f} GB"
            on_progress(f"{request.repo_id}: {name}, {size / 1e9:.2f} GB ({after})")
        with _explained(f"{name} of {request.repo_id}", folder.name):
            hf_hub_download(request.repo_id, name, **at)
        done += size


def _remove_wrong_sizes(request: _Request, folder: Path, sizes: Mapping[str, int]) -> None:
    """Make the client fetch damaged files anew: it takes whatever has the right name for finished."""
    there = {name: size for name, size in sizes.items() if (folder / name).is_file()}
    for name, problem in wrong_sizes(folder, there).items():
        logger.warning("%s of %s in the cache %s: removed, to be fetched anew", name, request.repo_id, problem)
        remove_cached(folder / name)


def _verify(request: _Request, folder: Path, records: Mapping[str, RepoSibling]) -> None:
    """Compare hashes with the Hub's record, if that was asked for."""
    wrong = {}
    for name, record in records.items() if request.verify else ():
        path = folder / name
        if record.lfs is None:
            kind, expected = "git hash", record.blob_id
            actual = hash_file(path, hashlib.sha1(b"blob %d\0" % path.stat().st_size))
        else:
            kind, expected, actual = "sha256", record.lfs.sha256, hash_file(path, hashlib.sha256())
        if actual != expected:
            wrong[name] = f"has the {kind} {actual}, the Hub records {expected}"
    _remove_and_raise(request, folder, wrong)


def _remove_and_raise(request: _Request, folder: Path, wrong: Mapping[str, str]) -> None:
    """Remove files that are not as the Hub records them, so that the next run fetches them anew, and say so."""
    for name in wrong:
        remove_cached(folder / name)
    if wrong:
        raise CheckpointError(
            f"{request.repo_id}: {_listed(wrong)}; removed from the cache, run it again to fetch it anew"
        )


def _require_whole_weights(request: _Request, folder: Path) -> None:
    """Open all weights: a file of the recorded length may have been cut short before it was recorded."""
    with _damage_named(request):
        require_whole_weights(folder, request.parts, request.files)


@contextmanager
def _damage_named(request: _Request) -> Iterator[None]:
    """Say of which repository a damaged file is, and what to do."""
    try:
        yield
    except ValueError as error:
        check = f"`python scripts/download.py {request.repo_id} --verify` tells whether the Hub's copy is the same"
        raise CheckpointError(f"{request.repo_id}: {error}; {check}, if so another revision may be whole") from error


def _listed(problems: Mapping[str, str]) -> str:
    return "; ".join(f"{name} {problem}" for name, problem in problems.items())


def _remove_orphans(storage: Path) -> None:
    """Remove what killed runs left half written: the client begins a file of its own in every run."""
    from huggingface_hub.utils import WeakFileLock

    locks = storage.parent / ".locks" / storage.name
    for orphan in (storage / "blobs").glob("*.incomplete"):
        etag = orphan.name.partition(".")[0]
        locks.mkdir(parents=True, exist_ok=True)
        try:
            with WeakFileLock(locks / f"{etag}.lock", timeout=LOCK_SECONDS):
                orphan.unlink(missing_ok=True)
        except TimeoutError:
            logger.info("%s is being written by another process", orphan)


def _write_ref(request: _Request, commit: str) -> None:
    ref = request.storage / "refs" / (request.revision or DEFAULT_BRANCH)
    if request.revision != commit and (not ref.is_file() or ref.read_text() != commit):
        ref.parent.mkdir(parents=True, exist_ok=True)
        with complete_file(ref, overwrite=True) as temporary:
            temporary.write_text(commit)


def _cached_commit(request: _Request) -> str:
    snapshots = request.storage / "snapshots"
    if not snapshots.is_dir():
        raise RepositoryError(f"{request.repo_id} is not in the cache {request.cache_dir}; {request.remedy}")
    revision = request.revision or DEFAULT_BRANCH
    ref = request.storage / "refs" / revision
    commit = ref.read_text().strip() if ref.is_file() else revision
    if not (snapshots / commit).is_dir():
        others = ", ".join(sorted(path.name for path in snapshots.iterdir())) or "none"
        raise RepositoryError(
            f"revision {revision} of {request.repo_id} is not in the cache {request.cache_dir}, "
            f"of its commits there are {others}; {request.remedy}"
        )
    return commit


def _cached_sizes(request: _Request, commit: str) -> dict[str, int]:
    """Return the commit's file list as the client recorded it; empty where client or cache are older than 2.4."""
    try:
        from huggingface_hub import get_cached_repo_tree
        from huggingface_hub.errors import CachedRepoTreeNotFoundError
    except ImportError:
        return {}

    try:
        tree = get_cached_repo_tree(request.repo_id, revision=commit, cache_dir=request.cache_dir)
    except CachedRepoTreeNotFoundError:
        return {}
    return {file.path: file.size for file in tree}


@contextmanager
def _explained(what: str, revision: str | None) -> Iterator[None]:
    """Turn the client's errors about `what` into ones that say what to do."""
    from huggingface_hub.errors import HTTPError  # of the HTTP library that the client uses

    try:
        yield
    except (HTTPError, OSError, RuntimeError, json.JSONDecodeError) as error:  # RuntimeError: hf_xet
        raise _explanation(error, what, revision) from error


def _explanation(error: Exception, what: str, revision: str | None) -> DownloadError:
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HTTPError,
        LocalEntryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # the client looked in the cache after this
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    where = f" ({error.response.url})" if isinstance(error, HfHubHTTPError) else ""
    if isinstance(error, RevisionNotFoundError):
        return RepositoryError(f"the Hub has no revision {revision!r} of {what}; without one it is the default branch")
    if isinstance(error, GatedRepoError):
        return AccessError(f"{what} is gated: accept its terms on its page, then set HF_TOKEN to a token of yours")
    if status in (401, 403):
        return AccessError(
            f"the Hub refuses {what} (HTTP {status}): set HF_TOKEN to a token that may read it, and check the name: "
            "the Hub answers the same where there is no such repository"
        )
    if status == 404:
        return RepositoryError(f"the Hub has no {what}{where}; check the name")
    if status is not None:
        return NetworkError(f"the Hub answers {what} with HTTP {status}{where}; try again, finished files are kept")
    if isinstance(error, (HTTPError, ConnectionError, json.JSONDecodeError)):
        return NetworkError(
            f"the Hub cannot be reached for {what}: {error}; check the network and try again, finished files are "
            "kept; with --offline or HF_HUB_OFFLINE=1 the cache is used as it is"
        )
    return DownloadError(f"{what} could not be fetched: {error}; try again, finished files are kept")
