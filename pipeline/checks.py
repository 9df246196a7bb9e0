"""What a request must satisfy before any heavy work: every problem at once, each with the nearest thing that works.

Plain Python: the command line reports bad input without loading torch.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from ..configs.errors import PromptError, RequestError, SettingsError, UserError

if TYPE_CHECKING:
    from ..configs import Preset

MAX_POSITIONS = 128
"""Positions per axis that the published models know: 509 frames, 2048 pixels (checkpoints.md)."""

DEFAULT_NABLA_P = 0.9
"""What most published checkpoints were trained with (checkpoints.md)."""


MAX_COUNT = 10_000
"""Most steps of a run, and most videos of a prompt: more is a slip of the hand."""

SHOWN = 60
"""Characters of a text that a message shows."""

T = TypeVar("T")


def shortened(text: str) -> str:
    """Return a text as a message shows it, the end of a long one left out: it may have any length."""
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def prompt_list(prompt: object, name: str = "prompt") -> list[str]:
    """Return prompts as a list of texts.

    Raises:
        ValueError: if it is neither a text nor a list of texts, the list is empty, or a text cannot be encoded.
    """
    prompts = [prompt] if isinstance(prompt, str) else prompt
    if not isinstance(prompts, (list, tuple)):
        raise PromptError(f"{name} {prompt!r}: must be a text or a list of texts, not {type(prompt).__name__}")
    if not prompts:
        raise PromptError(f"the list of {name}s is empty: give at least one (an empty text is allowed)")
    for text in prompts:
        if not isinstance(text, str):
            raise PromptError(f"a {name} must be a text, not {type(text).__name__}: {text!r}")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise PromptError(f"a {name} is no valid text (it holds bytes that are not UTF-8): {text!r}")
    return list(prompts)


class Report:
    """Collects problems, so that a user sees all of them at once."""

    def __init__(self) -> None:
        self.problems: list[UserError] = []

    def add(self, kind: type[UserError], sentences: Iterable[str]) -> None:
        """Add a problem of a kind for each sentence."""
        self.extend(kind(sentence) for sentence in sentences)

    def extend(self, problems: Iterable[UserError]) -> None:
        """Add problems."""
        self.problems.extend(problems)

    def attempt(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T | None:
        """Return what the function returns; where it raises a `UserError`, add that and return None.

        A ValueError of a library becomes a `RequestError` of the same message.
        """
        try:
            return function(*args, **kwargs)
        except UserError as error:
            self.problems.append(error.with_traceback(None))  # whose frames would be kept with all they hold
        except ValueError as error:
            self.problems.append(RequestError(str(error)))
        return None

    def raise_if_any(self) -> None:
        """Raise one error that lists all problems, if there are any: of their kind, or a `RequestError` of several."""
        kinds = {type(problem) for problem in self.problems}
        if kinds:
            kind = kinds.pop() if len(kinds) == 1 else RequestError
            raise kind("; ".join(map(str, self.problems)))


@dataclass(frozen=True)
class Geometry:
    """How pixels and frames become tokens.

    Attributes:
        spatial_ratio: pixels per latent, along height and width.
        temporal_ratio: frames per latent frame; the first frame has a latent of its own.
        patch_size: latents per token along t, h, w.
        nabla: attention is NABLA, which has a P.
    """

    spatial_ratio: int = 8
    temporal_ratio: int = 4
    patch_size: tuple[int, int, int] = (1, 2, 2)
    nabla: bool = False

    @classmethod
    def from_configs(cls, vae: Mapping[str, Any], transformer: Mapping[str, Any], nabla: bool) -> Geometry:
        """Return the geometry that a checkpoint's configs describe; what they leave out is as published."""
        return cls(
            vae.get("spatial_compression_ratio", cls.spatial_ratio),
            vae.get("temporal_compression_ratio", cls.temporal_ratio),
            tuple(transformer.get("patch_size", cls.patch_size)),
            nabla,
        )

    def pixel_step(self, axis: int) -> int:
        """Return what the height (axis 1) or width (axis 2) must be a multiple of, in pixels."""
        return self.spatial_ratio * self.patch_size[axis]


@dataclass(frozen=True)
class Settings:
    """The numbers of one run, each given by the user or taken from the preset.

    Attributes:
        height: pixels.
        width: pixels.
        num_frames: frames of the video.
        num_inference_steps: Euler steps.
        guidance_scale: w of classifier-free guidance; 1 is no guidance.
        shift: s of the schedule.
        scale_factor: RoPE divisors along t, h, w.
        nabla_P: mass of the block map that NABLA keeps; None for dense attention.
        num_videos: videos per prompt.
    """

    height: int
    width: int
    num_frames: int
    num_inference_steps: int
    guidance_scale: float
    shift: float
    scale_factor: tuple[float, float, float]
    nabla_P: float | None
    num_videos: int = 1

    @classmethod
    def from_preset(cls, preset: Preset, geometry: Geometry, **given: Any) -> Settings:
        """Return the settings of a run: what is given and not None, and the preset's values for the rest."""
        given = {name: _plain(value) for name, value in given.items() if value is not None}
        defaults = {field.name: getattr(preset, field.name) for field in fields(cls) if hasattr(preset, field.name)}
        if not geometry.nabla:
            defaults["nabla_P"] = None
        elif defaults["nabla_P"] is None:  # NABLA chosen for a checkpoint whose preset is dense
            defaults["nabla_P"] = DEFAULT_NABLA_P
        return cls(**{**defaults, **given})

    def problems(self, geometry: Geometry) -> list[str]:
        """Return one sentence for each value that cannot be honoured; empty if all can."""
        found = [*_size_problems(geometry, self.height, self.width), *_frame_problems(geometry, self.num_frames)]
        counts = {"number of steps": self.num_inference_steps, "number of videos": self.num_videos}
        for name, count in counts.items():
            if not is_whole(count) or not 1 <= count <= MAX_COUNT:
                found.append(f"{name} {count!r}: must be a whole number from 1 to {MAX_COUNT}")
        if not is_number(self.guidance_scale) or self.guidance_scale < 0:
            found.append(f"guidance scale {self.guidance_scale!r}: must be a number, 0 or more (1 is no guidance)")
        if not is_number(self.shift) or self.shift <= 0:
            found.append(f"shift {self.shift!r}: must be a number above 0")
        factors = self.scale_factor if isinstance(self.scale_factor, (tuple, list)) else ()
        if len(factors) != 3 or not all(is_number(factor) and factor > 0 for factor in factors):
            found.append(f"scale factor {self.scale_factor!r}: must be three numbers above 0, for t, h, w")
        if self.nabla_P is not None and not geometry.nabla:
            found.append(f"NABLA P {self.nabla_P!r}: attention is dense here and keeps everything; leave P out")
        elif self.nabla_P is not None and not (is_number(self.nabla_P) and 0 < self.nabla_P <= 1):
            found.append(f"NABLA P {self.nabla_P!r}: the kept mass must be a number above 0 and at most 1")
        return found


def nearest_multiples(value: float, step: int, low: int, high: int) -> list[int]:
    """Return the one or two multiples of `step` within `low` .. `high` that are nearest to `value`."""
    below = int(value // step) * step  # exact for whole numbers of any length
    candidates = {min(max(candidate, low), high // step * step) for candidate in (below, below + step)}
    return sorted(candidates)


def frames_of_duration(geometry: Geometry, seconds: float, fps: float) -> int:
    """Return the frame count of a duration: seconds * fps + 1, as the checkpoints count (10 s are 241 frames).

    Raises:
        ValueError: if that is no legal count; the message names the nearest durations.
    """
    frames = seconds * fps + 1
    if not math.isfinite(frames) or frames < 1:
        raise SettingsError(f"duration {seconds!r}: must be 0 or more seconds")
    legal = _legal_frames(geometry, frames)
    if all(abs(frames - count) > 1e-6 for count in legal):
        nearest = " and ".join(f"{(count - 1) / fps:g} s ({count} frames)" for count in legal)
        raise SettingsError(
            f"duration {seconds:g} s: makes {frames:g} frames at {fps:g} fps; the nearest are {nearest}"
        )
    return round(frames)


def _size_problems(geometry: Geometry, height: int, width: int) -> Iterator[str]:
    for name, size, axis in (("height", height, 1), ("width", width, 2)):
        step, most = geometry.pixel_step(axis), MAX_POSITIONS * geometry.spatial_ratio * geometry.patch_size[axis]
        if not is_whole(size):
            yield f"{name} {size!r}: must be a whole number of pixels"
        elif size % step or not step <= size <= most:
            nearest = " or ".join(map(str, nearest_multiples(size, step, step, most)))
            yield f"{name} {size}: must be a multiple of {step} from {step} to {most}; nearest: {nearest}"


def _frame_problems(geometry: Geometry, num_frames: int) -> Iterator[str]:
    step = geometry.temporal_ratio * geometry.patch_size[0]
    most = (MAX_POSITIONS * geometry.patch_size[0] - 1) * geometry.temporal_ratio + 1
    if not is_whole(num_frames):
        yield f"number of frames {num_frames!r}: must be a whole number"
    elif (num_frames - 1) % step or not 1 <= num_frames <= most:
        nearest = " or ".join(map(str, _legal_frames(geometry, num_frames)))
        yield f"number of frames {num_frames}: must be {step}k + 1, from 1 to {most}; nearest: {nearest}"


def _legal_frames(geometry: Geometry, frames: float) -> list[int]:
    step = geometry.temporal_ratio * geometry.patch_size[0]
    most = (MAX_POSITIONS * geometry.patch_size[0] - 1) * geometry.temporal_ratio + 1
    return [count + 1 for count in nearest_multiples(frames - 1, step, 0, most - 1)]


def is_whole(value: object) -> TypeGuard[int]:
    """Whether it is a whole number, of numpy's too."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a number that a float can hold, of numpy's too."""
    try:
        return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def _plain(value: Any) -> Any:
    """Return numbers as int and float, whatever type they came in; all else, which is refused later, as it is."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    if is_whole(value):
        return int(value)
    return float(value) if is_number(value) else value
