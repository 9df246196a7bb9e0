"""The demo's scorer names what is drawn, and calls neither blobs circles nor ghosts objects."""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from kandinsky5_nabla.attention import NablaAttentionMetadataBuilder, sta_mask
from kandinsky5_nabla.models.transformer import Kandinsky5Transformer
from kandinsky5_nabla.pipeline.attention_report import recorded_attention
from kandinsky5_nabla.scripts._demo_disturb import BLOBS, DISTURBANCES, SIDE, add_ghost, draw_shape
from kandinsky5_nabla.scripts._demo_scenes import (
    HELD_OUT_PHRASINGS,
    TRAINED_PHRASINGS,
    Scene,
    Words,
    captions_of,
    draw_scene,
    is_held_out,
    render,
)
from kandinsky5_nabla.scripts._demo_score import judge, largest_region, look
from kandinsky5_nabla.scripts.evaluate_demo import make_grid, mean_density, score, shape_scores, to_markdown
from kandinsky5_nabla.scripts.make_demo_checkpoint import MOTIONS, SHAPES, TRANSFORMER_CONFIG

SCENE = Scene(Words("square", "red", "moving left", "white", "small", "slowly"), 0.5, 0.5)


def scenes(count: int) -> list[Scene]:
    chance = random.Random(5)
    return [draw_scene(chance) for _ in range(count)]


@pytest.mark.parametrize("disturbance", ["clean", "noise", "blur"])
def test_a_rendered_scene_has_everything_right_also_with_noise_and_blur(disturbance):
    noise = np.random.default_rng(0)
    for scene in scenes(12):
        clip = DISTURBANCES[disturbance](render(scene, SIDE, 5).numpy(), noise)
        assert judge(look(clip), scene.words)["all"], scene


@pytest.mark.parametrize("blob", BLOBS)
def test_a_blob_is_no_circle_and_no_other_shape(blob):
    calls = Counter(look(draw_shape(blob, scene)).shape for scene in scenes(10))
    assert calls["blob"] >= 9, calls


def test_another_shape_is_named_and_judged_wrong():
    for drawn in SHAPES:
        seen = look(draw_shape(drawn, SCENE))
        assert seen.shape == drawn
        assert judge(seen, SCENE.words)["shape"] is (drawn == "square")


def test_a_ghost_is_not_the_object_but_counts_against_the_clip():
    clip = render(SCENE, SIDE, 5).numpy()
    clean, haunted = look(clip), look(add_ghost(clip, np.random.default_rng(0)))
    assert (haunted.shape, haunted.direction, haunted.colour) == (clean.shape, clean.direction, clean.colour)
    assert clean.single == 1
    assert haunted.single == 0
    assert not judge(haunted, SCENE.words)["all"]


def test_a_trail_that_touches_the_object_counts_against_the_clip():
    scene = replace(SCENE, words=replace(SCENE.words, speed="quickly"))
    clip = render(scene, SIDE, 9).numpy()
    trail = clip.copy()
    trail[1:] = 0.6 * clip[1:] + 0.4 * clip[:1]  # where the object began it stays faintly
    assert look(clip).single == 1
    assert look(trail).single < 0.9


@pytest.mark.parametrize("motion", MOTIONS)
def test_each_direction_is_named(motion):
    clip = render(replace(SCENE, words=replace(SCENE.words, motion=motion)), SIDE, 5).numpy()
    assert look(clip).direction == motion


def test_a_jump_is_not_steady_and_a_diagonal_way_has_no_name():
    still = render(replace(SCENE, words=replace(SCENE.words, motion="standing still")), SIDE, 5).numpy()
    jump, askew = still.copy(), still.copy()
    jump[2] = np.roll(still[2], 20, axis=1)
    for frame in range(5):
        askew[frame] = np.roll(still[frame], (5 * frame, 5 * frame), axis=(0, 1))
    assert look(still).steady
    assert not look(jump).steady
    assert look(askew).direction == "askew"


def test_an_empty_clip_shows_nothing_but_its_background():
    seen = look(np.full((5, SIDE, SIDE, 3), 0.5))
    assert (seen.shape, seen.colour, seen.direction, seen.background) == ("nothing", "nothing", "nothing", "gray")
    assert not judge(seen, SCENE.words)["motion"]


def test_a_background_of_no_known_colour_is_named_so():
    assert look(np.full((5, 32, 32, 3), [0.0, 1.0, 0.3])).background == "nothing"


def test_the_largest_region_joins_runs_around_corners_and_leaves_islands():
    mask = np.array([[1, 0, 1, 0, 1], [1, 1, 1, 0, 0], [0, 0, 0, 0, 1], [1, 0, 0, 0, 1]], dtype=bool)
    expected = np.zeros_like(mask)
    expected[0, [0, 2]] = expected[1, :3] = True
    assert (largest_region(mask) == expected).all()


def test_the_grid_keeps_its_groups_apart_and_covers_shapes_and_directions():
    tasks = make_grid(144)
    assert Counter(task.group for task in tasks) == {
        "trained": 72,
        "held-out combinations": 36,
        "held-out phrasings": 36,
    }
    for task in tasks:
        assert is_held_out(*task.words.combination) is (task.group == "held-out combinations")
        phrasings = HELD_OUT_PHRASINGS if task.group == "held-out phrasings" else TRAINED_PHRASINGS
        assert task.prompt in captions_of(task.words, phrasings)
    assert min(Counter(task.words.shape for task in tasks).values()) >= 44
    assert min(Counter(task.words.motion for task in tasks).values()) >= 20
    assert len({task.seed for task in tasks}) == 144


def test_the_table_has_a_row_per_group_and_the_shapes_apart():
    right = judge(look(render(SCENE, SIDE, 5).numpy()), SCENE.words)
    clips = [
        {"group": "trained", "words": {"shape": "square"}, "right": right},
        {"group": "trained", "words": {"shape": "circle"}, "right": right | {"shape": False, "all": False}},
    ]
    report = {
        "scores": {"trained": score(clips)},
        "shapes": shape_scores(clips),
        "density": 0.5,
        "attention": "NABLA_ATTN",
        "dtype": "float32",
    }
    table = to_markdown(report)
    assert "| trained | 2 | 100.0 % | 100.0 % | 100.0 % | 50.0 % | 100.0 % | 100.0 % | 50.0 % |" in table
    assert "circle 0.0 %, square 100.0 %" in table
    assert "Kept blocks: 50.0 %" in table


@torch.no_grad()
def test_the_density_is_the_mean_over_layers_and_calls_and_there_is_none_of_dense_attention():
    torch.manual_seed(0)
    transformer = Kandinsky5Transformer(**TRANSFORMER_CONFIG | {"num_visual_blocks": 2})
    transformer.set_attention_backend("NABLA_REFERENCE")
    inputs = torch.randn(1, 2, 16, 32, 13), torch.randn(1, 3, 64), torch.randn(1, 64), torch.tensor([500.0])
    window = sta_mask((2, 1, 2), (1, 1, 1))
    with recorded_attention(transformer) as records:
        for P in (1.0, 0.3):
            transformer(*inputs, attn_metadata=NablaAttentionMetadataBuilder().build(0, window, P, (2, 8, 16)))
    assert mean_density(records[:2]) == 1
    assert mean_density(records[2:]) < 1
    assert mean_density(records) == pytest.approx((1 + mean_density(records[2:])) / 2)
    assert mean_density([]) is None
