"""The precisions of a run: which dtypes the text encoder and the transformer can be kept in, and on which device.

The unquantised ones are those of torch. `int8` and `nf4` (bitsandbytes, an extra) are for the text encoder,
`fp8` (diffusers' layerwise casting, no extra) is for the transformer. All three are ways to store weights: what is
computed with them is computed in `compute_dtype`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..configs.errors import DependencyError, DeviceError, DtypeError, UserError

if TYPE_CHECKING:
    import torch
    from transformers import BitsAndBytesConfig

    from ..models.transformer import Kandinsky5Transformer

FLOAT_DTYPES = ("float32", "bfloat16", "float16")
TEXT_ENCODER_DTYPES = (*FLOAT_DTYPES, "int8", "nf4")
DIT_DTYPES = (*FLOAT_DTYPES, "fp8")
SHORT_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

EXTRA = 'pip install "kandinsky5-nabla[quantization]"'


def full_dtype_name(name: str) -> str:
    """Return the full name of a dtype that may be given by its short one, such as bf16; other names as they are."""
    return SHORT_NAMES.get(name, name)


def compute_dtype(name: str, device: str) -> torch.dtype:
    """Return the dtype of what is computed, and of what is never quantised: norms, embedding tables.

    A dtype of torch is its own. For int8, nf4 and fp8 it is bf16, but fp32 on a CPU. It is never fp16: Qwen2.5-VL was
    trained in bf16, and its hidden states can pass 65504, the largest number of fp16.

    Raises:
        ValueError: if there is no such dtype.
    """
    import torch

    name = _known(name, dict.fromkeys((*TEXT_ENCODER_DTYPES, *DIT_DTYPES)), "dtype")
    if name in FLOAT_DTYPES:
        return getattr(torch, name)
    return torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16


def text_encoder_quantization(name: str, device: str) -> BitsAndBytesConfig | None:
    """Return the `quantization_config` of a text encoder's dtype, to be loaded with `dtype=compute_dtype(...)`.

    None for a dtype of torch. nf4 has a scale for every 64 weights (4.5 bits a weight), int8 one for each row. Inputs
    of int8 layers that pass 6 are multiplied unquantised, as is bitsandbytes' default (LLM.int8()).

    Raises:
        ValueError: if a text encoder cannot be kept in such a dtype.
    """
    from transformers import BitsAndBytesConfig

    name = _known(name, TEXT_ENCODER_DTYPES, "text encoder dtype")
    if name == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    if name == "nf4":
        computed = compute_dtype(name, device)
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=computed)
    return None


def precision_problems(text_encoder_dtype: str, dit_dtype: str, device: str | None) -> list[UserError]:
    """Return why these dtypes cannot run on a device, with what can; empty if they can.

    int8, nf4 and fp8 are tried on the device with a matrix of 64 x 64, so that whatever is missing (the
    package, its library for this CUDA, a kernel, the device) is found before a weight is read.

    Args:
        text_encoder_dtype: of `TEXT_ENCODER_DTYPES`.
        dit_dtype: of `DIT_DTYPES`.
        device: "cpu", "cuda", "cuda:N" or another of torch's; None to look at the names alone.
    """
    trials = {"int8": _try_int8, "nf4": _try_nf4, "fp8": _try_fp8}
    choices = (
        ("text encoder dtype", text_encoder_dtype, TEXT_ENCODER_DTYPES),
        ("transformer dtype", dit_dtype, DIT_DTYPES),
    )
    problems: list[UserError] = []
    for title, asked, known in choices:
        try:
            name = _known(asked, known, title)
        except DtypeError as error:
            problems.append(error)
            continue
        if device is not None and name in trials:
            problems += _trial_problems(f"{title} {name}", device, trials[name])
    return problems


def cast_transformer(transformer: Kandinsky5Transformer, name: str, compute_dtype: torch.dtype | None = None) -> None:
    """Keep a transformer's weights in a dtype, in place.

    fp8 (e4m3) is storage: the Linear layers of the attentions and feed-forwards, nearly all of the weights, are
    cast to `compute_dtype` each time they run and back afterwards, which loses nothing further. Modulation
    and time embeddings stay fp32; text and patch embeddings, norms and the output layer are in `compute_dtype`.
    LoRAs are loaded before.

    Args:
        transformer: in any dtype of torch.
        name: of `DIT_DTYPES`.
        compute_dtype: of fp8; the transformer's own where it is left out.

    Raises:
        ValueError: if the name is unknown, the transformer is kept in fp8 already, or a weight is not within the
            range of fp8 (the transformer is of no use then).
    """
    import torch

    name = _known(name, DIT_DTYPES, "transformer dtype")
    if any(parameter.dtype == torch.float8_e4m3fn for parameter in transformer.parameters()):
        raise DtypeError(f"the transformer is kept in fp8 already: load it again to keep it in {name}")
    dtype = getattr(torch, name) if name in FLOAT_DTYPES else compute_dtype or transformer.dtype
    # Not ModelMixin.to, which warns that fp32 parts would be cast: ours keep themselves in fp32.
    torch.nn.Module.to(transformer, dtype)
    if name == "fp8":
        transformer.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=dtype)
        _refuse_what_left_the_range(transformer)


def _known(name: str, known: Any, title: str) -> str:
    """Return the full name of a dtype.

    Raises:
        ValueError: if it is none of the known ones.
    """
    full = full_dtype_name(name)
    if full not in known:
        raise DtypeError(f"{title} {name!r}: must be one of {', '.join(known)}")
    return full


def _refuse_what_left_the_range(transformer: Kandinsky5Transformer) -> None:
    """Raise a ValueError that names the weights that fp8 clamped to its largest number, or that are no numbers."""
    import torch

    largest = torch.finfo(torch.float8_e4m3fn).max
    lost = [
        name
        for name, parameter in transformer.named_parameters()
        if parameter.dtype == torch.float8_e4m3fn and not parameter.float().abs().max() < largest
    ]
    if lost:
        raise DtypeError(
            f"fp8 holds numbers below {largest:g}, and {len(lost)} of the transformer's weights have larger ones "
            f"or NaN: {', '.join(lost[:5])}; keep it in bfloat16"
        )


def _trial_problems(title: str, device: str, trial: Callable[[str], bool]) -> list[UserError]:
    """Return what a trial on the device raises, or that its numbers are wrong."""
    try:
        if trial(device):
            return []
        reason = f"gives wrong numbers on the device {device}"
    except ModuleNotFoundError as error:
        sentence = f"{title}: needs {error.name} ({EXTRA}); without it use {', '.join(FLOAT_DTYPES)}"
        return [DependencyError(sentence)]
    except (ImportError, OSError, RuntimeError, AssertionError) as error:  # what torch and bitsandbytes raise
        # Their first sentence: lists of all backends and instructions for developers follow.
        reason = f"cannot run on the device {device} ({str(error).strip().splitlines()[0].partition('. ')[0]})"
    elsewhere = "" if device == "cpu" else ", or the device cpu"
    return [DtypeError(f"{title}: {reason}; use {', '.join(FLOAT_DTYPES)}{elsewhere}")]


def _bitsandbytes(device: str) -> Any:
    """Return the package, if transformers can use its version and it supports the device itself."""
    import bitsandbytes
    import torch
    from transformers.utils.import_utils import BITSANDBYTES_MIN_VERSION, is_bitsandbytes_available

    if not is_bitsandbytes_available():
        raise DependencyError(
            f"bitsandbytes {bitsandbytes.__version__} is too old: {BITSANDBYTES_MIN_VERSION} is needed"
        )
    supported = bitsandbytes.supported_torch_devices
    if torch.device(device).type not in supported:
        raise DeviceError(f"bitsandbytes supports {', '.join(sorted(supported))}")
    return bitsandbytes


def _try_int8(device: str) -> bool:
    """Whether a product with the identity, which int8 holds exactly, returns the other factor."""
    import torch

    bitsandbytes = _bitsandbytes(device)
    weight_ND = torch.eye(64, dtype=torch.float16, device=device)
    x_MD = torch.full((8, 64), 2.0, dtype=torch.float16, device=device)
    state = bitsandbytes.MatmulLtState()
    state.is_training = False  # the path of a forward without gradients
    return torch.allclose(bitsandbytes.matmul(x_MD, weight_ND, state=state, threshold=6.0), x_MD, rtol=0.01)


def _try_nf4(device: str) -> bool:
    """Whether a product with the identity, which nf4 holds exactly, returns the other factor."""
    import torch

    bitsandbytes = _bitsandbytes(device)
    weight_ND = torch.eye(64, dtype=compute_dtype("nf4", device), device=device)
    x_MD = torch.full((8, 64), 2.0, dtype=weight_ND.dtype, device=device)
    packed, state = bitsandbytes.functional.quantize_4bit(weight_ND, quant_type="nf4")
    return torch.allclose(bitsandbytes.matmul_4bit(x_MD, packed, quant_state=state), x_MD, rtol=0.01)


def _try_fp8(device: str) -> bool:
    """Whether numbers that fp8 has come back from it."""
    import torch

    exact = torch.linspace(-4, 4, 33, device=device)
    computed = compute_dtype("fp8", device)
    return torch.equal(exact.to(torch.float8_e4m3fn).to(computed).float(), exact)
