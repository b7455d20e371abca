"""Images mean what the PNG specification says, for every kind of colour and depth, or they are refused."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import numpy.typing as npt
import pytest
import torch

pytest.importorskip("PIL.Image")

from PIL import Image

from subnetact.errors import InvalidRequest
from subnetact.serve.payloads import Images, Signature

GREY, RGB, PALETTE, GREY_ALPHA, RGB_ALPHA = 0, 2, 3, 4, 6
CHANNELS = {GREY: 1, RGB: 3, PALETTE: 1, GREY_ALPHA: 2, RGB_ALPHA: 4}
LUMA = np.array([0.299, 0.587, 0.114])
SHAPE = (5, 7)


def png(colour: int, depth: int, values: npt.NDArray[np.int64], **chunks: bytes) -> bytes:
    """Write a PNG file of values of shape (height, width, channels)."""
    height, width, _ = values.shape
    bits = (values.reshape(height, -1, 1) >> np.arange(depth - 1, -1, -1)) & 1
    rows = np.packbits(bits.reshape(height, -1).astype(np.uint8), axis=1)
    lines = b"".join(b"\0" + row.tobytes() for row in rows)
    parts = {"IHDR": struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0), **chunks}
    found = b"\x89PNG\r\n\x1a\n"
    for name, data in [*parts.items(), ("IDAT", zlib.compress(lines)), ("IEND", b"")]:
        whole = name.encode() + data
        found += struct.pack(">I", len(data)) + whole + struct.pack(">I", zlib.crc32(whole))
    return found


def random_values(colour: int, depth: int) -> npt.NDArray[np.int64]:
    """Return values from black to white; alpha is opaque."""
    values = np.random.default_rng(depth).integers(0, 2**depth, (*SHAPE, CHANNELS[colour]))
    values[0, 0], values[0, 1] = 0, 2**depth - 1
    if colour in (GREY_ALPHA, RGB_ALPHA):
        values[..., -1] = 2**depth - 1
    return values


def reader(channels: int) -> Images:
    """Return what decodes images for a network of grey or coloured images."""
    return Images(Signature(torch.zeros(channels, *SHAPE)), (0.0,), (1.0,))


def agree(found: torch.Tensor, colours: npt.NDArray[np.float64], tolerance: float) -> None:
    """Compare a decoded image with its colours, of shape (height, width, 3), from 0 to 1."""
    expected = colours if found.shape[0] == 3 else colours @ LUMA[:, None]
    assert np.abs(found.permute(1, 2, 0).numpy() - expected).max() <= tolerance


KINDS = [
    *((GREY, depth) for depth in (1, 2, 4, 8, 16)),
    *((RGB, depth) for depth in (8, 16)),
    *((GREY_ALPHA, depth) for depth in (8, 16)),
    *((RGB_ALPHA, depth) for depth in (8, 16)),
]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("colour", "depth"), KINDS)
def test_black_is_0_and_white_1_at_every_depth(colour: int, depth: int, channels: int) -> None:
    values = random_values(colour, depth)
    shown = values[..., :3] if colour in (RGB, RGB_ALPHA) else values[..., :1].repeat(3, axis=-1)
    found = reader(channels).decode(png(colour, depth, values))
    exact = colour == GREY or depth < 16  # other images are read with 8 bits per channel
    agree(
        found,
        shown / (2**depth - 1),
        (1e-6 if exact else 1 / 255) + (1 / 255 if colour in (RGB, RGB_ALPHA) else 0),
    )
    assert found[:, 0, 0].abs().max() == 0.0
    assert found[:, 0, 1].sub(1.0).abs().max() < 1e-6


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("depth", [1, 2, 4, 8])
@pytest.mark.parametrize("opaque", [False, True])
def test_palettes_are_looked_up(depth: int, channels: int, opaque: bool) -> None:
    values = random_values(PALETTE, depth)
    palette = np.random.default_rng(1).integers(0, 256, (2**depth, 3))
    chunks = {"PLTE": palette.astype(np.uint8).tobytes()}
    if opaque:
        chunks["tRNS"] = b"\xff" * 2**depth
    agree(
        reader(channels).decode(png(PALETTE, depth, values, **chunks)), palette[values[..., 0]] / 255, 1 / 255
    )


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("depth", [8, 16])
@pytest.mark.parametrize("colour", [GREY_ALPHA, RGB_ALPHA])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.99])
def test_transparent_pixels_are_refused(colour: int, depth: int, channels: int, alpha: float) -> None:
    values = random_values(colour, depth)
    values[2, 3, -1] = int(alpha * (2**depth - 1))
    with pytest.raises(InvalidRequest, match="transparent pixels"):
        reader(channels).decode(png(colour, depth, values))


@pytest.mark.parametrize(("colour", "depth"), [(c, d) for c, d in KINDS if c in (GREY, RGB)])
def test_a_colour_that_counts_as_transparent_is_refused(colour: int, depth: int) -> None:
    values = random_values(colour, depth)
    key = struct.pack(f">{CHANNELS[colour]}H", *values[1, 1].tolist())
    with pytest.raises(InvalidRequest, match="a colour that is transparent"):
        reader(1).decode(png(colour, depth, values, tRNS=key))


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_transparent_colours_of_a_palette_are_refused_if_pixels_have_them(depth: int) -> None:
    values, chunks = random_values(PALETTE, depth), {"PLTE": b"\x80" * 3 * 2**depth, "tRNS": b"\x00"}
    with pytest.raises(InvalidRequest, match="transparent pixels"):
        reader(1).decode(png(PALETTE, depth, values, **chunks))
    values[values == 0] = 1
    agree(reader(1).decode(png(PALETTE, depth, values, **chunks)), np.full((*SHAPE, 3), 128 / 255), 1e-6)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("mode", "ink", "colour"),
    [
        ("L", 51, (0.2, 0.2, 0.2)),
        ("RGB", (255, 51, 0), (1.0, 0.2, 0.0)),
        ("YCbCr", (255, 128, 128), (1.0, 1.0, 1.0)),
        ("CMYK", (255, 0, 0, 0), (0.0, 1.0, 1.0)),
        ("CMYK", (0, 255, 255, 0), (1.0, 0.0, 0.0)),
        ("CMYK", (0, 0, 0, 255), (0.0, 0.0, 0.0)),
        ("CMYK", (0, 0, 0, 0), (1.0, 1.0, 1.0)),
        ("CMYK", (0, 0, 0, 51), (0.8, 0.8, 0.8)),
    ],
)
def test_every_kind_of_jpeg_has_its_colour(
    mode: str, ink: object, colour: tuple[float, ...], channels: int
) -> None:
    file = io.BytesIO()
    Image.new(mode, (SHAPE[1], SHAPE[0]), ink).save(file, "JPEG", quality=100)
    agree(reader(channels).decode(file.getvalue()), np.broadcast_to(colour, (*SHAPE, 3)), 0.015)
