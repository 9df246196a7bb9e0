"""`--expand-prompt`: why it cannot be done, and the videos of a plan with the texts that Qwen has written for them."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from kandinsky5_nabla.configs.errors import UsageError, UserError
from kandinsky5_nabla.pipeline.checks import Report, shortened
from kandinsky5_nabla.pipeline.single_file import part_folder
from kandinsky5_nabla.scripts._log import say
from kandinsky5_nabla.scripts._stages import stage

if TYPE_CHECKING:
    from kandinsky5_nabla.pipeline import Kandinsky5NablaPipeline
    from kandinsky5_nabla.scripts._checkpoint import Checkpoint
    from kandinsky5_nabla.scripts._plan import Plan


def check_expansion(report: Report, args: argparse.Namespace, checkpoint: Checkpoint) -> None:
    """Report why prompts cannot be expanded: they are encoded already, or a text encoder that lies here has no head."""
    if args.embeds is not None:
        sentence = "--expand-prompt: the prompts of --embeds are encoded already; leave one of the two out"
        report.add(UsageError, [sentence])
    elif not report.problems and (folder := _text_encoder_folder(checkpoint)) is not None:
        from kandinsky5_nabla.models.writer import find_head  # here: it loads torch

        try:
            find_head(folder)
        except UserError as error:
            report.add(type(error), [f"--expand-prompt: {error}"])


def expand_videos(pipe: Kandinsky5NablaPipeline, plan: Plan, spent: dict[str, float]) -> Plan:
    """Return the plan with the prompts that Qwen has written; each of them, too, is printed."""
    from kandinsky5_nabla.pipeline.expand import expand_prompts

    typed = list(dict.fromkeys(video.prompt for video in plan.videos))
    with stage("expand", spent, "expanding the text"):
        written = dict(zip(typed, expand_prompts(pipe, typed), strict=True))
    expanded = {short: text for short, text in written.items() if text != short}
    for short, text in expanded.items():
        shown = shortened(" ".join(short.split()))
        say("expanded", f'"{shown}" is expanded to: {text}', short_prompt=short, prompt=text)
    videos = [
        dataclasses.replace(video, prompt=expanded[video.prompt], short_prompt=video.prompt)
        if video.prompt in expanded
        else video
        for video in plan.videos
    ]
    return dataclasses.replace(plan, videos=videos)


def _text_encoder_folder(checkpoint: Checkpoint) -> Path | None:
    """Return where the text encoder's files lie; None where they are not here yet."""
    if checkpoint.folder is not None:
        return checkpoint.folder / "text_encoder"
    given = checkpoint.parts.get("text_encoder")
    return None if given is None else part_folder("text_encoder", given)
