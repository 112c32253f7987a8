"""From a reference to pixels."""

from rosebatch.core.errors import RowError
from rosebatch.io.images.contents import contents
from rosebatch.io.images.decode import DecodeLimits, Pixels, decode
from rosebatch.io.images.pdf import Page
from rosebatch.io.images.picture import Picture
from rosebatch.io.images.policy import MediaPolicy
from rosebatch.io.images.references import ImageReference


def load_image(reference: ImageReference, policy: MediaPolicy, limits: DecodeLimits | None = None) -> Pixels:
    """Read and decode an image. Any thread may call this.

    Raises:
        RowError: see ``contents`` and ``decode``; the message begins with the image's place.
        UserError: Pillow is not installed.
    """
    source = reference.source
    if isinstance(source, Picture):
        return Pixels.of(source.rgb())
    file, page = (source.path, source.number) if isinstance(source, Page) else (source, None)
    try:
        return decode(contents(file, policy), limits, page)
    except RowError as error:
        raise RowError(error.code, f"{reference.where}: {error.message}") from None
