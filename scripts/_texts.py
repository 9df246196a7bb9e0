"""The texts of a run, encoded: each prompt, and what it is guided against."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kandinsky5_nabla.pipeline import Kandinsky5NablaPipeline
from kandinsky5_nabla.pipeline.embeds_file import EncodedTexts
from kandinsky5_nabla.pipeline.lora import with_triggers
from kandinsky5_nabla.pipeline.text import DEFAULT_NEGATIVE_PROMPT, TextEmbeddings

if TYPE_CHECKING:
    from kandinsky5_nabla.scripts._videos import Video


@dataclass(frozen=True)
class Texts:
    """Embeddings by their text, on the CPU.

    Attributes:
        prompts: of the videos.
        negatives: what they are guided against; empty without guidance.
    """

    prompts: Mapping[str, TextEmbeddings]
    negatives: Mapping[str, TextEmbeddings]

    @classmethod
    def encoded(cls, pipe: Kandinsky5NablaPipeline, videos: Iterable[Video], guided: bool) -> Texts:
        """Encode what videos need, one text at a time.

        In a batch the last bits of a text depend on the others in it, and a video that is made again alone would not
        repeat its bytes.
        """

        def encode(text: str) -> TextEmbeddings:
            on_device = pipe.encode_prompt(text)
            tensors = {each.name: getattr(on_device, each.name).cpu() for each in dataclasses.fields(on_device)}
            return TextEmbeddings(**tensors)

        prompts = dict.fromkeys(video.prompt for video in videos)
        spoken = with_triggers(list(prompts), pipe.acting_trigger_words)
        negatives = dict.fromkeys(negative_of(video) for video in videos if guided)
        return cls(
            {prompt: encode(text) for prompt, text in zip(prompts, spoken, strict=True)},
            {text: encode(text) for text in negatives},
        )

    @classmethod
    def saved(cls, texts: EncodedTexts, videos: Iterable[Video]) -> Texts:
        """Return what videos need of saved texts, which have it."""
        negatives = {} if texts.negative is None else {negative_of(video): texts.negative[1] for video in videos}
        return cls({video.prompt: texts.prompt(video.prompt) for video in videos}, negatives)

    def of(self, video: Video) -> EncodedTexts:
        """Return the texts of one video."""
        text = negative_of(video)
        return EncodedTexts(
            {video.prompt: self.prompts[video.prompt]}, (text, self.negatives[text]) if self.negatives else None
        )

    def together(self) -> EncodedTexts:
        """Return all texts as a file has them; there is one negative prompt at most."""
        [*negatives] = self.negatives.items()
        assert len(negatives) <= 1, "the plan has checked it"
        return EncodedTexts(self.prompts, negatives[0] if negatives else None)


def negative_of(video: Video) -> str:
    """Return the text that a video is guided against."""
    return DEFAULT_NEGATIVE_PROMPT if video.negative_prompt is None else video.negative_prompt
