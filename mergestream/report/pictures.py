"""The picture of a model card."""

from __future__ import annotations

from pathlib import Path

from mergestream.errors import first_line
from mergestream.progress import Progress
from mergestream.store.manifest import Manifest


def draw_pictures(manifest: Manifest, progress: Progress, directory: Path) -> dict[str, str]:
    """Draw λ of an OPCM store to a directory; returns the file name and its caption, or nothing for other methods.

    A failure to draw is a note; a failure to write is an error, as for every other file of an export.
    """
    if not manifest.is_opcm:
        return {}
    try:
        from mergestream.report.figures import save, scaling

        figure = scaling({"λ": [entry.lambda_ for entry in manifest.history]})
        save(figure, directory / "lambda.png", dpi=120, metadata={"Software": None})
    except ImportError:
        progress.note("the model card has no picture: it needs matplotlib; pip install 'mergestream[report]'")
    except OSError:
        raise
    except Exception as error:
        progress.note(f"the model card has no picture: it could not be drawn ({first_line(error)})")
    else:
        return {"lambda.png": "The scaling factor λ after each expert, against √t"}
    return {}
