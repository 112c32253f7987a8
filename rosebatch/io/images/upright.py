"""A picture of Pillow as transformers' image processors have it. Importing this needs Pillow."""

from PIL import Image, ImageOps


def upright_rgb(image: Image.Image) -> Image.Image:
    """The first picture in three channels of 8 bits, turned as its EXIF data says. What shines through is white."""
    image = ImageOps.exif_transpose(image)
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
