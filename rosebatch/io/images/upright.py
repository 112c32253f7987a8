"""A picture of Pillow as transformers' image processors have it. Importing this needs Pillow."""

from typing import Any

from PIL import Image, ImageOps

# Of a grey of 16 bits, to one of 8.
_STEPS = 1 << 8


def upright_rgb(image: Image.Image) -> Image.Image:
    """The first picture in three channels of 8 bits, turned as its EXIF data says. What shines through is white.

    Raises:
        ValueError: its greys are floating point, or have more than 16 bits: it is not said which of them is white.
    """
    image = ImageOps.exif_transpose(image)
    if image.mode == "F" or image.mode.startswith("I"):
        image = _grey(image)
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def _grey(image: Image.Image) -> Image.Image:
    """The 8 highest of 16 bits: Pillow itself makes all from 255 on white."""
    extrema: Any = image.getextrema()
    darkest, lightest = extrema
    if image.mode == "F" or darkest < 0 or lightest >= _STEPS**2:
        raise ValueError("its greys are no numbers of 8 or 16 bits: save it with 8 bits")
    return image.convert("I").point(lambda value: value * (1 / _STEPS)).convert("L")
