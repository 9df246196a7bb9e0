"""What fails while running, as a kind of the catalogue: libraries and the system raise errors of their own."""

from __future__ import annotations

import errno

from kandinsky5_nabla.configs.errors import OutOfMemoryError, StageError, TakenError, UserError, WriteError, kind_of

_OF_WRITING = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}


def kind_of_failure(error: BaseException) -> type[UserError]:
    """Return the class of an error of the catalogue, and the one that fits an error of a library or the system."""
    return kind_of(error, _foreign(error))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out; on a CPU torch has no class of its own for that, only the allocator's name."""
    import torch  # here: a command line that has not needed it yet answers at once

    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in str(error)


def _foreign(error: BaseException) -> type[UserError]:
    from safetensors import SafetensorError  # of writing: what cannot be read is a CheckpointError by now

    if isinstance(error, FileExistsError):  # another program took the name meanwhile
        return TakenError
    if isinstance(error, SafetensorError) or (isinstance(error, OSError) and error.errno in _OF_WRITING):
        return WriteError
    return OutOfMemoryError if is_out_of_memory(error) else StageError
