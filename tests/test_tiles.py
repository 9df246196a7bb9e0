"""The fixed table of VAE tiles, and decoding with it."""

import pytest
import torch

from kandinsky5_nabla.configs.tiles import Tile, find_tile, next_smaller, read_tiles, vae_tiles
from kandinsky5_nabla.pipeline.decode import decode_latents

ROW = "{side: 256, stride: 192, frames: 16, frame_stride: 12}"


@pytest.fixture
def latents(pipe):
    """Of 17 frames of 272x16: more than one tile of the table along the height, two along the time."""
    return torch.randn(1, 5, 34, 2, pipe.transformer.config["out_visual_dim"], generator=torch.manual_seed(0))


def decoded_shapes(vae, latents, tile):
    """Returns the latent shapes (T, H, W) that the decoder was given, in order."""
    shapes = []
    hook = vae.decoder.register_forward_pre_hook(lambda _, inputs: shapes.append(tuple(inputs[0].shape[2:])))
    try:
        decode_latents(vae, latents, "cpu", tile)
    finally:
        hook.remove()
    return shapes


def test_the_default_tile_gives_the_pixels_that_diffusers_gives_by_default(pipe, latents):
    pipe.vae.enable_tiling(256, 256, 16, 192, 192, 12)
    z_BCTHW = latents.permute(0, 4, 1, 2, 3) / pipe.vae.config["scaling_factor"]
    with torch.no_grad():
        expected = pipe.vae.decode(z_BCTHW).sample.clamp(-1, 1)
    assert torch.equal(decode_latents(pipe.vae, latents, "cpu"), expected)
    assert torch.equal(decode_latents(pipe.vae, latents, "cpu", vae_tiles()[0]), expected)


@pytest.mark.parametrize("tile", vae_tiles(), ids=lambda tile: tile.name)
def test_every_tile_gives_the_whole_video_and_the_same_pixels_again(pipe, latents, tile):
    video = decode_latents(pipe.vae, latents, "cpu", tile)
    assert video.shape == (1, 3, 17, 272, 16)
    decode_latents(pipe.vae, latents, "cpu", vae_tiles()[-1])  # another tile in between leaves nothing behind
    assert torch.equal(decode_latents(pipe.vae, latents, "cpu", tile), video)


def test_the_layout_follows_from_size_and_tile_alone(pipe, latents):
    # Along the height 0..34 in steps of 24 and tiles of 32; along the time 0..5 in steps of 3 and tiles of 4 + 1.
    by_default = [(5, 32, 2), (5, 10, 2), (2, 32, 2), (2, 10, 2)]
    assert decoded_shapes(pipe.vae, latents, None) == by_default
    in_three = [(frames, rows, 2) for frames in (3, 3, 1) for rows in (18, 17)]
    assert decoded_shapes(pipe.vae, latents, Tile(side=144, stride=136, frames=8, frame_stride=8)) == in_three


def test_two_videos_are_decoded_as_each_alone(pipe, latents):
    both = torch.cat([latents, latents.flip(1)])
    videos = decode_latents(pipe.vae, both, "cpu", vae_tiles()[-1])
    assert torch.equal(videos[1:], decode_latents(pipe.vae, both[1:], "cpu", vae_tiles()[-1]))


def test_the_table_goes_from_large_to_small_and_ends():
    tile, seen = vae_tiles()[0], []
    while tile is not None:
        seen.append(tile)
        tile = next_smaller(tile)
    assert tuple(seen) == vae_tiles()
    volumes = [tile.volume for tile in seen]
    assert volumes == sorted(volumes, reverse=True)
    assert volumes[-1] < 0.2 * volumes[0]


def test_a_tile_is_found_by_its_name_and_an_unknown_one_is_refused_with_the_names():
    assert [find_tile(tile.name) for tile in vae_tiles()] == list(vae_tiles())
    with pytest.raises(ValueError, match=r"'512x16': must be one of 256x16, 192x16"):
        find_tile("512x16")
    with pytest.raises(ValueError, match="not in the table"):
        next_smaller(Tile(512, 384, 16, 12))


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("{", "cannot be read"),
        ("side: 256", "must be a list"),
        ("[]", "must be a list"),
        ("- 256", "row 1: must have the keys side, stride"),
        (f"- {ROW[:-1]}, overlap: 4}}", "row 1: must have the keys"),
        ("- {side: 256, stride: 192, frames: 16}", "row 1: must have the keys"),
        (f"- {ROW.replace('256', '256.0')}", "whole numbers"),
        (f"- {ROW.replace('256', 'true')}", "whole numbers"),
        (f"- {ROW}\n- {ROW.replace('192', '100')}", "row 2: side 256 and stride 100 must be multiples of 8"),
        (f"- {ROW.replace('192', '264')}", "stride 264 must be"),
        (f"- {ROW.replace('12}', '0}')}", "frame_stride 0 must be"),
        (f"- {ROW.replace('16', '18')}", "frames 18 and"),
        (f"- {ROW}\n- {ROW}", "from the largest to the smallest"),
        (f"- {ROW.replace('256', '250')}\n- {ROW.replace('16', '18')}", "row 1: side 250.*row 2: frames 18"),
    ],
)
def test_a_table_that_is_not_valid_is_refused_with_every_row_and_rule(tmp_path, text, rule):
    table = tmp_path / "tiles.yaml"
    table.write_text(text)
    with pytest.raises(ValueError, match=rule) as caught:
        read_tiles(table)
    assert str(table) in str(caught.value)


def test_a_table_that_is_missing_is_refused_with_its_name(tmp_path):
    with pytest.raises(ValueError, match=r"none\.yaml cannot be read"):
        read_tiles(tmp_path / "none.yaml")
