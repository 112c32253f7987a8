"""From a reference to pixels."""

from rosebatch.core.errors import RowError
from rosebatch.io.images.contents import contents
from rosebatch.io.images.decode import DecodeLimits, Pixels, decode
from rosebatch.io.images.picture import Picture
from rosebatch.io.images.policy import MediaPolicy
from rosebatch.io.images.references import ImageReference


def load_image(reference: ImageReference, policy: MediaPolicy, limits: DecodeLimits | None = None) -> Pixels:
    """Read and decode an image. Any thread may call this.

    Raises:
        RowError: see ``contents`` and ``decode``; the message begins with the image's place.
        UserError: Pillow is not installed.
    """
    if isinstance(reference.source, Picture):
        return Pixels.of(reference.source.rgb())
    try:
        return decode(contents(reference.source, policy), limits)
    except RowError as error:
        raise RowError(error.code, f"{reference.where}: {error.message}") from None
