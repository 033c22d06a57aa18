"""Students' pictures, decoded and drawn again by Pillow. A browser gets a new file with only their pixels.

A file may be made to take gigabytes or minutes to decode. So its size in pixels is checked first, and all pictures of a
submission share one allowance.
"""

import base64
import io
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

from PIL import Image

from grading.submissions.figures import Figure, Place

# Maximum number of pixels of one picture. A picture of 10 by 8 inches at 300 dots per inch has 7 million pixels.
MAX_PIXELS = 12_000_000
# Maximum number of pixels of all pictures of one submission.
ALL_PIXELS = 48_000_000
# Longest side of a shown picture, in pixels. The column that shows the work is about half the page wide, so it never
# needs more pixels than this.
_MAX_SIDE = 900
# Maximum number of scans in a progressive JPEG. Each scan costs a pass over the whole picture. An ordinary file has
# about ten scans.
_MAX_SCANS = 64
_SCAN = b"\xff\xda"


@dataclass(frozen=True, slots=True)
class Plot:
    """A picture that is safe to show, with its width and height in pixels."""

    place: Place
    source: str  # a data: URI with a PNG or JPEG
    width: int
    height: int


def plots(figures: Iterable[Figure]) -> list[Plot]:
    """Return those of the pictures that can be shown, within the allowance."""
    safe_plots: list[Plot] = []
    pixels_left = ALL_PIXELS
    for figure in figures:
        plot, pixels = _plot(figure, min(pixels_left, MAX_PIXELS))
        pixels_left -= pixels
        if plot:
            safe_plots.append(plot)
    return safe_plots


def _plot(figure: Figure, most_pixels: int) -> tuple[Plot | None, int]:
    """Return the picture, if it can be shown, and how many pixels were decoded."""
    if not figure.data or figure.data.count(_SCAN) > _MAX_SCANS:
        return None, 0
    pixels = 0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns about small errors in the file
            with Image.open(io.BytesIO(figure.data), formats=("PNG", "JPEG")) as picture:
                width, height = picture.size
                if width * height > most_pixels:
                    return None, 0
                pixels = width * height
                return _redraw(picture, figure.place), pixels
    except Exception:  # noqa: BLE001  damaged files raise a dozen kinds
        return None, pixels


def _redraw(picture: Image.Image, place: Place) -> Plot:
    """Draw the picture on white, as on paper: its axes are black, and the page may be dark."""
    kind = "PNG" if picture.format == "PNG" else "JPEG"
    picture.draft("RGB", (_MAX_SIDE, _MAX_SIDE))
    picture.thumbnail((_MAX_SIDE, _MAX_SIDE))
    image = Image.new("RGB", picture.size, "white")
    rgba_picture = picture.convert("RGBA") if picture.has_transparency_data else None
    image.paste(rgba_picture or picture.convert("RGB"), mask=rgba_picture)
    file = io.BytesIO()
    image.save(file, kind, **({"compress_level": 1} if kind == "PNG" else {"quality": 85}))
    payload = base64.b64encode(file.getvalue()).decode("ascii")
    return Plot(place, f"data:image/{kind.lower()};base64,{payload}", *image.size)
