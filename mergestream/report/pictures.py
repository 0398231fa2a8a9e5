"""The pictures of a model card."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mergestream.errors import first_line
from mergestream.progress import Progress
from mergestream.store.snapshot import Snapshot


def picture_drawer(snapshot: Snapshot, progress: Progress) -> Callable[[Path], dict[str, str]]:
    """A function that draws the pictures of a card to a directory, and returns their file names and captions.

    A failure to draw is a note; a failure to write is an error, as for every other file of an export.
    """

    def draw(directory: Path) -> dict[str, str]:
        if not snapshot.manifest.is_opcm:
            return {}
        try:
            from mergestream.report.figures import write_pictures

            return write_pictures(directory, snapshot.manifest)
        except ImportError:
            progress.note("the model card has no pictures: they need matplotlib; pip install 'mergestream[report]'")
        except OSError:
            raise
        except Exception as error:
            progress.note(f"the model card has no pictures: they could not be drawn ({first_line(error)})")
        return {}

    return draw
