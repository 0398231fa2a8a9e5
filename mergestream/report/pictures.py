"""The pictures of a model card."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from mergestream.errors import first_line
from mergestream.progress import Progress
from mergestream.report.diagnostics import Similarity, similarity
from mergestream.store.manifest import Manifest
from mergestream.store.snapshot import Snapshot


def picture_drawer(progress: Progress) -> Callable[[Snapshot], Callable[[Path], dict[str, str]]]:
    """A function that reads the sketches of a snapshot, and returns another that draws the pictures to a directory."""
    return lambda snapshot: partial(draw_pictures, progress, snapshot.manifest, similarity(snapshot))


def draw_pictures(progress: Progress, manifest: Manifest, found: Similarity, directory: Path) -> dict[str, str]:
    """Draw the pictures of a model card; returns their file names and captions. A failure to draw is a note.

    A failure to write is an error, as for every other file of an export.
    """
    try:
        from mergestream.report.figures import write_pictures

        return write_pictures(directory, manifest, found)
    except ImportError:
        progress.note("the model card has no pictures: they need matplotlib; pip install 'mergestream[report]'")
    except OSError:
        raise
    except Exception as error:
        progress.note(f"the model card has no pictures: they could not be drawn ({first_line(error)})")
    return {}
