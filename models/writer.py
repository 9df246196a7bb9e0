"""The text encoder as a writer: the loaded language model of Qwen2.5-VL with its output head, while that is needed.

Legend: V words of the vocabulary, D width of Qwen.
"""

import copy
import json
import re
from pathlib import Path

import torch
from transformers import Qwen2ForCausalLM

from ..configs.errors import CheckpointError
from .headers import TRANSFORMERS_WEIGHTS, TensorHeader, open_weights, read_headers, weight_files
from .text_encoder import QwenTextEncoder

_HEAD = "lm_head.weight"
_EMBEDDINGS = re.compile(r"^(model\.)?(language_model\.)?embed_tokens\.weight$")


class QwenWriter(Qwen2ForCausalLM):
    """A loaded text encoder with an output head, for transformers' `generate`; none of its weights is copied.

    Qwen2's own class around the language model of Qwen2.5-VL: on text alone the whole Qwen2.5-VL does nothing else.
    The encoder is called as for a prompt, so that the hooks of offloading run, and it does not change.
    """

    def __init__(self, encoder: QwenTextEncoder, head_VD: torch.Tensor) -> None:
        with torch.device("meta"):  # what is built here is replaced
            super().__init__(copy.deepcopy(encoder.config))  # pyright: ignore[reportArgumentType]
        self.model = encoder
        self.lm_head.weight = torch.nn.Parameter(head_VD, requires_grad=False)

    @property
    def device(self) -> torch.device:
        """The head's: an offloaded encoder lies elsewhere until it runs, and `generate` would follow it there."""
        return self.lm_head.weight.device


def find_head(folder: Path) -> tuple[str, TensorHeader]:
    """Return name and header of the output head of a text encoder's folder; it may be tied to the embeddings.

    Raises:
        FileNotFoundError: if the folder has no weights.
        CheckpointError: if there is no head, or it is not stored as plain numbers `[V, D]`.
    """
    headers = read_headers(weight_files(folder, TRANSFORMERS_WEIGHTS))
    embeddings = next(filter(_EMBEDDINGS.match, headers), None)
    name = _HEAD if _HEAD in headers else embeddings
    if embeddings is None or name is None or (name == embeddings and not _is_tied(folder)):
        raise CheckpointError(
            f"the text encoder in {folder} can read but not write: it was saved without its output head ({_HEAD}); "
            "take it as it was published"
        )
    head, wanted = headers[name], headers[embeddings].shape
    if not head.floating or head.shape != wanted:
        raise CheckpointError(
            f"the text encoder in {folder} has an output head of {head.dtype} {list(head.shape)}, not of floating "
            f"point numbers {list(wanted)}; take it as it was published"
        )
    return name, head


def read_head(folder: Path, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Return the output head `[V, D]`, the only tensor that is read; errors as those of `find_head`."""
    name, header = find_head(folder)
    with open_weights(header.file) as weights:
        return weights.get_tensor(name).to(device, dtype)


def _is_tied(folder: Path) -> bool:
    """Return whether the config says that the embeddings are the head, too; older files say it of the text's part."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    return any(part.get("tie_word_embeddings") for part in (config, config.get("text_config") or {}))
