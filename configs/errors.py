"""The catalogue of errors: one class for each kind of thing that can go wrong for a user.

The first line of a class's docstring says what happened, `remedy` what to do about any error of its kind; the message
of an error names the value, the rule and the nearest thing that works. Each class is a built-in one too, so that
`except ValueError` and `except OSError` mean what they always do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar


class UserError(Exception):
    """Something went wrong that a user can do something about.

    Attributes:
        remedy: what that is, in a sentence.
        exit_codes: the command line's, the usual one first: 2 for what is found before any weight is read, 1 for what
            fails while running.
    """

    remedy: ClassVar[str] = ""
    exit_codes: ClassVar[tuple[int, ...]] = (2,)


def catalogue(base: type[UserError] = UserError) -> Iterator[type[UserError]]:
    """Yield all classes below `base`, in the order of this file."""
    for kind in base.__subclasses__():
        yield kind
        yield from catalogue(kind)


def kind_of(error: BaseException, otherwise: type[UserError]) -> type[UserError]:
    """Return the class of an error of the catalogue, and `otherwise` for one of a library or the system."""
    return type(error) if isinstance(error, UserError) else otherwise


class UsageError(UserError, ValueError):
    """The command line cannot be parsed, or its options contradict each other."""

    remedy = "`--help` lists the arguments; leave out the one that is named, or correct it."


class RequestError(UserError, ValueError):
    """A request has problems of several kinds, or one that only a library has found."""

    remedy = "Each part of the message is a problem of its own; mend all of them."


class SettingsError(UserError, ValueError):
    """A size, count, seed or another setting of a run cannot be honoured."""

    remedy = "Take one of the nearest values in the message; nothing is rounded silently."


class ArgumentError(UserError, ValueError):
    """An argument of a Python call is not supported, or a tensor has another shape than it must have."""

    remedy = "The docstring of the function says what it takes, with shapes and layouts."


class PromptError(UserError, ValueError):
    """There is no prompt, one is not a text, or the negative ones are too few."""

    remedy = "Give texts in UTF-8, empty ones are allowed, and one negative prompt for all or for each."


class PromptsFileError(UserError, ValueError):
    """A file of prompts, or a row of it, cannot be used."""

    remedy = "Correct the line that is named; rows that are done already are not made again."
    exit_codes = (2, 1)


class PresetError(UserError, ValueError):
    """A preset is unknown, or a YAML file is not a valid one."""

    remedy = "`--list` shows the presets; a file of your own has the entries of those in `configs/`."


class NotFoundError(UserError, FileNotFoundError):
    """A file or folder that was named is not there."""

    remedy = "Correct the path, which begins in the current folder; the folder of an output has to be created first."
    exit_codes = (2, 1)


class CheckpointError(UserError, ValueError):
    """A checkpoint is damaged, incomplete, of another model, or holds more than data."""

    remedy = "Download it again (`scripts/download.py --verify` compares every file), or take one that is supported."
    exit_codes = (2, 1)


class DownloadError(UserError, OSError):
    """A file of the Hub could not be fetched."""

    remedy = "Try again: finished files are kept; `--cache-dir` names a folder with more room, or one to write to."
    exit_codes = (1, 2)


class RepositoryError(DownloadError, FileNotFoundError):
    """A repository, revision or file is not on the Hub or, offline, not in the cache."""

    remedy = "Check the name and the revision; offline, fetch it first with `scripts/download.py`."
    exit_codes = (2, 1)


class AccessError(DownloadError, PermissionError):
    """The Hub wants a token, or one with more rights."""

    remedy = "Accept the terms on the repository's page, and set HF_TOKEN."
    exit_codes = (1,)


class NetworkError(DownloadError, ConnectionError):
    """The Hub cannot be reached, or has a fault."""

    remedy = "Check the network and try again, or run with `--offline` on what the cache has."
    exit_codes = (1,)


class LoraError(UserError, ValueError):
    """A LoRA is damaged, of another model, or cannot be loaded in the state of the pipeline."""

    remedy = "Take a LoRA for this transformer, as a safetensors file; load it before fp8 casting and fusing."
    exit_codes = (2, 1)


class EmbedsError(UserError, ValueError):
    """Encoded prompts are damaged, or do not fit the run."""

    remedy = "Encode the prompts again with the text encoders of this checkpoint (`--save-embeds`)."
    exit_codes = (2, 1)


class DeviceError(UserError, ValueError, RuntimeError):
    """The device does not exist here, or cannot run this."""

    remedy = "`--device cpu` always works; `--config demo` is quick there."


class DtypeError(UserError, ValueError):
    """A dtype is unknown, or not possible for this part, device or checkpoint."""

    remedy = "float32, bfloat16 and float16 work everywhere; int8, nf4 and fp8 where the message says."
    exit_codes = (2, 1)


class DependencyError(UserError, ImportError, ValueError):
    """A package of an extra is missing or too old."""

    remedy = 'Install the extra that is named, such as `pip install "kandinsky5-nabla[lora]"`.'
    exit_codes = (2, 1)


class BackendError(UserError, ValueError):
    """The attention that was chosen is unknown, or cannot run this."""

    remedy = "Choose a backend that can: `NABLA_ATTN`, `NABLA_REFERENCE` or `SDPA`; there is no silent fallback."
    exit_codes = (2, 1)


class MemoryPlanError(UserError, ValueError):
    """The run does not fit into the memory that is free."""

    remedy = "Take the change that the message calculates, or free memory."
    exit_codes = (2, 1)


class OutOfMemoryError(UserError, MemoryError):
    """Memory ran out, in spite of the plan."""

    remedy = "Go on from the kept state with the options that the message names, or free memory."
    exit_codes = (1,)


class OutputError(UserError, ValueError, OSError):
    """Nothing can be written under a name: it has the wrong ending, or its folder is not writable."""

    remedy = "Choose another name, in a folder that you may write to."


class TakenError(UserError, FileExistsError, IsADirectoryError, NotADirectoryError):
    """The name of an output is taken by a file, a folder, another run's state, or a process that makes it now."""

    remedy = "Choose another name, wait for the process, or replace what is there with `--overwrite`."
    exit_codes = (2, 1)


class WriteError(UserError, OSError, RuntimeError):
    """A file could not be written while running, such as on a full disk."""

    remedy = "Free space or permit writing, then go on with `--resume`: the state on the disk is whole."
    exit_codes = (1,)


class VideoError(UserError, ValueError):
    """Frames cannot be written with a codec as asked, or a file is not a complete video."""

    remedy = "Take the sizes, rates and codecs that the message names; make a damaged video anew."


class StateError(UserError, ValueError):
    """A run's state is damaged, or the options would make another video of it."""

    remedy = "Leave out the options that are named, or start the run anew with `--overwrite`."


class RecordError(UserError, ValueError):
    """The record of how a video was made is missing, damaged, or at odds with its preset."""

    remedy = "Name a video of this program or the NAME.json beside it, or give the options yourself."


class PreviewError(UserError, ValueError):
    """The colours of latents are damaged, or of another VAE, or there are none for this one."""

    remedy = "Fit them with `scripts/fit_preview.py`, once the VAE is on this machine, or leave `--preview` out."


class NotFiniteError(UserError, ValueError):
    """The numbers have become NaN or infinite."""

    remedy = "Try bfloat16 or float32 in place of float16, less guidance, or whole weights."
    exit_codes = (1,)


class StageError(UserError, RuntimeError):
    """A stage of a run failed in a way that nothing here foresees."""

    remedy = "Run it again with `--debug`, and report the traceback."
    exit_codes = (1,)


class InterruptedRun(UserError):
    """The run was ended by Ctrl-C, SIGTERM or a closed terminal."""

    remedy = "Go on with the command that was printed, or run the same again."
    exit_codes = (130,)
