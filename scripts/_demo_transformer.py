"""Training of the demo's transformer: captions encoded once, then the rectified flow at three sizes.

Legend: B videos, T/H/W latent frames, rows, columns, C channels, L text tokens, D width of the text.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from kandinsky5_nabla.attention import NablaAttentionImpl
from kandinsky5_nabla.attention.lists import BlockLists
from kandinsky5_nabla.attention.order import BLOCK
from kandinsky5_nabla.models.transformer import Kandinsky5Transformer
from kandinsky5_nabla.pipeline.denoise import make_attention_metadata, model_input
from kandinsky5_nabla.pipeline.text import (
    DEFAULT_NEGATIVE_PROMPT,
    TextEmbeddings,
    prompt_prefix_length,
    tokenize_clip,
    tokenize_qwen,
)
from kandinsky5_nabla.scripts._demo_scenes import all_words, captions_of, draw_scene
from kandinsky5_nabla.scripts._demo_training import Stage, generator_of, train
from kandinsky5_nabla.scripts._demo_vae import scene_latents
from kandinsky5_nabla.scripts.make_demo_checkpoint import SEED, TRANSFORMER_CONFIG, fill_random

FULL_SIDE = 256  # pixels: every stage uses the token positions of this size
TIME_SHIFT = {64: 3.0, 128: 3.0, 256: 5.0}  # by frame size: more pixels show an object through more noise
MASK_P = 0.75  # of the masks in training; generation keeps a little less, the P of the config
DENSE_EVERY = 2  # every second step at 256 pixels attends densely: with masks alone dense attention loses the shapes
EMPTY, NEGATIVE = "", DEFAULT_NEGATIVE_PROMPT
DROPOUT = 0.1  # of captions; half becomes the empty text, half the default negative prompt
POOLED_SWAP = 0.5  # of the pooled embeddings are another caption's: a random CLIP's do not carry over to new phrasings
OBJECT_WEIGHT = 2.0  # of the latents that the object passes, over the plain background
PEAK_RATE, MATRIX_RATE = 1.2e-3, 0.012  # of AdamW and of Muon
BATCH = {64: 16, 128: 12, 256: 4}


@dataclass(frozen=True)
class Captions:
    """Embeddings of all captions, by text: `[L, D]` of Qwen and `[D2]` of CLIP."""

    qwen: dict[str, torch.Tensor]
    clip: dict[str, torch.Tensor]

    def batch(self, texts: Sequence[str]) -> TextEmbeddings:
        """Return the embeddings of B texts."""
        lengths_B = torch.tensor([len(self.qwen[text]) for text in texts])
        mask_BL = torch.arange(int(lengths_B.max()))[None, :] < lengths_B[:, None]
        embeds_BLD = pad_sequence([self.qwen[text] for text in texts], batch_first=True)
        return TextEmbeddings(embeds_BLD, mask_BL, torch.stack([self.clip[text] for text in texts]))


@torch.no_grad()
def encode_captions(texts: Sequence[str], encoders: dict[str, Any]) -> Captions:
    """Encode texts as the pipeline does, those of equal length together: nothing is padded, so the numbers are its.

    `encoders` has the pipeline's text parts by their names.
    """
    qwen, clip = encoders["text_encoder"], encoders["text_encoder_2"]
    prefix = prompt_prefix_length(encoders["tokenizer"])
    by_length = defaultdict(list)
    for text in dict.fromkeys(texts):
        by_length[len(ids := tokenize_qwen(encoders["tokenizer"], text))].append((text, ids))
    qwen_LD, clip_D = {}, {}
    for group in by_length.values():
        for first in range(0, len(group), 64):
            some, ids = zip(*group[first : first + 64], strict=True)
            hidden_BLD = qwen(input_ids=torch.tensor(ids), use_cache=False).last_hidden_state[:, prefix:]
            pairs = [tokenize_clip(encoders["tokenizer_2"], text) for text in some]
            ids_BL, mask_BL = (torch.tensor(rows) for rows in zip(*pairs, strict=True))
            pooled_BD = clip(input_ids=ids_BL, attention_mask=mask_BL).pooler_output
            qwen_LD |= {text: row.clone() for text, row in zip(some, hidden_BLD, strict=True)}
            clip_D |= {text: row.clone() for text, row in zip(some, pooled_BD, strict=True)}
    return Captions(qwen_LD, clip_D)


def all_captions() -> list[str]:
    """Return every text that training may draw."""
    return [text for words in all_words(held_out=False) for text in captions_of(words)] + [EMPTY, NEGATIVE]


def make_transformer() -> Kandinsky5Transformer:
    """Return the transformer at its start: blocks that pass their input on, and no velocity."""
    transformer = Kandinsky5Transformer(**TRANSFORMER_CONFIG)
    # Modulation starts small, not at zero: from zero the gates of attention learn slowly.
    fill_random(transformer, torch.Generator().manual_seed(SEED), {"modulation": 0.02, "out_layer.out_layer": 0.02})
    with torch.no_grad():
        for name, bias in transformer.named_parameters():
            if name.endswith("visual_modulation.out_layer.bias") or name.endswith("text_modulation.out_layer.bias"):
                gates = bias.unflatten(0, (-1, 3, TRANSFORMER_CONFIG["model_dim"]))[:, 2]
                gates.fill_(0.3)
    return transformer


def train_transformer(stage: Stage, transformer: Kandinsky5Transformer, side: int, captions: Captions) -> None:
    """Train at one frame size: at 256 pixels by turns densely and with NABLA's masks, below it densely.

    A smaller frame is but one block.
    """
    scale, shift = side / FULL_SIDE, TIME_SHIFT[side]
    metadata = None
    if side == FULL_SIDE:
        use_masked_sdpa(transformer)
        shape_THWC = scene_latents(draw_scene(random.Random(0)), side).shape
        metadata = make_attention_metadata(transformer, shape_THWC, MASK_P, "cpu")
    recent: list[float] = []

    def loss_of_step(step: int) -> torch.Tensor:
        chance = random.Random(step)
        latents_BTHWC, weight_BTHW1, texts = draw_batch(side, BATCH[side], chance)
        text, generator = captions.batch(texts), generator_of(stage.name, step)
        swapped_B = torch.rand(len(texts), generator=generator) < POOLED_SWAP
        pooled_BD = torch.where(swapped_B[:, None], text.pooled.roll(1, 0), text.pooled)
        # One time in each of B equal parts of 0 .. 1: the loss varies less from step to step.
        u_B = (torch.arange(len(texts)) + torch.rand(len(texts), generator=generator)) / len(texts)
        sigma_B = shift * u_B / (1 + (shift - 1) * u_B)
        noise = torch.randn(latents_BTHWC.shape, generator=generator)
        noisy = torch.lerp(latents_BTHWC, noise, sigma_B[:, None, None, None, None])
        velocity = transformer(
            model_input(transformer, noisy),
            text.prompt_embeds,
            pooled_BD,
            sigma_B * 1000,
            encoder_attention_mask=text.mask,
            scale_factor=(1.0, scale, scale),
            attn_metadata=metadata if step % DENSE_EVERY else None,
        ).sample
        loss = (weight_BTHW1 * (velocity - (noise - latents_BTHWC)) ** 2).mean()
        recent.append(loss.item())
        return loss

    def check() -> str:
        last = recent[-200:]
        return f"loss of the last {len(last)} steps {sum(last) / max(len(last), 1):.4f}"

    train(stage, transformer, loss_of_step, check, hidden_matrices(transformer))
    transformer.reset_attention_backend()


def hidden_matrices(transformer: Kandinsky5Transformer) -> list[torch.nn.Parameter]:
    """Return the matrices inside the blocks, without those of the modulation."""
    return [
        weight
        for name, weight in transformer.named_parameters()
        if weight.ndim == 2 and "transformer_blocks" in name and "modulation" not in name
    ]


class MaskedSdpaImpl(NablaAttentionImpl):
    """NABLA with a backward pass and no score matrix of its own: the block-sparse kernel has no backward pass."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        lists: BlockLists,
        real_S: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend to the kept blocks, for q, k, v `[B, S, H, D]`; the demo's frames divide into tiles."""
        assert real_S is None
        mask_BHSS = lists.kept.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
        q_BHSD, k_BHSD, v_BHSD = (x_BSHD.transpose(1, 2) for x_BSHD in (query, key, value))
        out_BHSD = F.scaled_dot_product_attention(q_BHSD, k_BHSD, v_BHSD, mask_BHSS, scale=self.softmax_scale)
        return out_BHSD.transpose(1, 2)


def use_masked_sdpa(transformer: Kandinsky5Transformer) -> None:
    """Give the visual blocks an implementation of NABLA that can be trained through."""
    for index, block in enumerate(transformer.visual_transformer_blocks):
        block.self_attention.set_impl(MaskedSdpaImpl, f"visual_transformer_blocks.{index}.self_attention")


def draw_batch(side: int, size: int, chance: random.Random) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """Return latents `[B, T, H, W, C]` of new scenes, weights `[B, T, H, W, 1]` of mean 1, captions with dropout."""
    scenes = [draw_scene(chance) for _ in range(size)]
    latents = [scene_latents(scene, side) for scene in scenes]
    texts = []
    for scene in scenes:
        drop = chance.random() / DROPOUT
        texts.append(chance.choice(captions_of(scene.words)) if drop >= 1 else EMPTY if drop < 0.5 else NEGATIVE)
    return torch.stack(latents), torch.stack([object_weight(clip) for clip in latents]), texts


def object_weight(latents_THWC: torch.Tensor) -> torch.Tensor:
    """Return weights `[T, H, W, 1]` of mean 1: the latents that differ from the corner's count more."""
    differs = (latents_THWC - latents_THWC[:1, :1, :1]).abs().amax(-1, keepdim=True) > 0.3
    weight = 1 + OBJECT_WEIGHT * differs
    return weight / weight.mean()
