"""The demo's scenes: what is held out stays out, captions say what the pixels show."""

import random

import pytest
import torch

from kandinsky5_nabla.scripts._demo_scenes import (
    DEFAULTS,
    FRAMES,
    HELD_OUT_PHRASINGS,
    PALETTE,
    RADIUS,
    TRAINED_PHRASINGS,
    Scene,
    Words,
    all_words,
    caption,
    captions_of,
    combinations,
    coverage,
    draw_scene,
    fits,
    is_held_out,
    render,
)
from kandinsky5_nabla.scripts.make_demo_checkpoint import COLOURS, MOTIONS, SHAPES

RED_SQUARE = Words("square", "red", "moving left", "white", "small", "slowly")


def drawn(count: int = 400) -> list[Scene]:
    chance = random.Random(0)
    return [draw_scene(chance) for _ in range(count)]


def test_training_draws_no_held_out_combination_and_no_white_on_white():
    words = [scene.words for scene in drawn()]
    assert not any(is_held_out(*each.combination) for each in words)
    assert not any(each.colour == each.background for each in words)
    assert {each.combination for each in words} <= set(combinations(held_out=False))


def test_held_out_combinations_leave_every_pair_of_words_to_training():
    trained = combinations(held_out=False)
    assert len(trained) == 90
    assert len(combinations(held_out=True)) == 15
    for first, second, names in [(0, 1, (COLOURS, SHAPES)), (0, 2, (COLOURS, MOTIONS)), (1, 2, (SHAPES, MOTIONS))]:
        assert {(each[first], each[second]) for each in trained} == {(a, b) for a in names[0] for b in names[1]}


def test_there_are_at_least_eight_phrasings_and_none_is_both_trained_and_held_out():
    assert len(set(TRAINED_PHRASINGS)) >= 8
    assert not set(TRAINED_PHRASINGS) & set(HELD_OUT_PHRASINGS)


def test_every_scene_has_a_caption_and_what_a_caption_leaves_out_is_the_default():
    for words in [*all_words(held_out=False), *all_words(held_out=True)]:
        texts = captions_of(words)
        assert texts, words
        for phrasing in TRAINED_PHRASINGS:
            if fits(phrasing, words):
                text = caption(phrasing, words)
                said = [value for value in (words.colour, words.shape, words.motion) if value in text]
                assert len(said) == 3, text
                for name in DEFAULTS:
                    silent = getattr(words, name) not in text
                    assert not silent or getattr(words, name) == DEFAULTS[name], (text, name)


def test_a_caption_has_the_right_article():
    words = Words("circle", "orange", "standing still", "black", "large", "quickly")
    assert captions_of(words)[0] == "an orange circle standing still on a black background"


def test_the_object_stays_inside_the_frame_for_the_whole_clip():
    for scene in drawn(60):
        alpha_FHW = coverage(scene, 64)
        assert alpha_FHW.shape == (FRAMES, 64, 64)
        border = torch.cat([alpha_FHW[:, 0], alpha_FHW[:, -1], alpha_FHW[:, :, 0], alpha_FHW[:, :, -1]])
        assert border.max() == 0, scene


@pytest.mark.parametrize(("shape", "area"), [("circle", 3.14159), ("square", 4.0), ("triangle", 1.73205 * 1.25**2)])
def test_a_shape_covers_its_area(shape, area):
    scene = Scene(Words(shape, "red", "standing still", "black", "large", "quickly"), 0.5, 0.5)
    covered = coverage(scene, 128, frames=1).mean().item()
    assert covered == pytest.approx(area * RADIUS["large"] ** 2, rel=0.02)


def test_a_triangle_points_up():
    scene = Scene(Words("triangle", "red", "standing still", "black", "large", "quickly"), 0.5, 0.5)
    width_H = coverage(scene, 64, frames=1)[0].sum(dim=1)
    rows = width_H.nonzero().flatten()
    assert width_H[rows[1]] < width_H[rows[-2]] / 4


def test_pixels_show_the_words():
    clip = render(Scene(RED_SQUARE, 0.5, 0.5), 64)
    assert torch.allclose(clip[0, 0, 0], torch.tensor(PALETTE["white"]))
    assert torch.allclose(clip[0, 32, round(64 * 0.58)], torch.tensor(PALETTE["red"]))  # starts right of the middle
    assert torch.allclose(clip[-1, 32, round(64 * 0.42)], torch.tensor(PALETTE["red"]))  # and has gone left


def test_a_window_is_that_part_of_the_whole_frame():
    scene = drawn(1)[0]
    whole, part = coverage(scene, 64), coverage(scene, 64, window=(20, 12), side=32)
    assert torch.allclose(part, whole[:, 12:44, 20:52], atol=1e-4)
