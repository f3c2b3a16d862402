"""`serve --demo`: the glyphs run of `make demo`, calibrated, with a gallery of characters to draw."""

import unicodedata
from collections.abc import Callable
from pathlib import Path

from nearkin import gallery as room
from nearkin.data import glyphs
from nearkin.gallery import Gallery, results
from nearkin.gallery.items import encoder_info

__all__ = ["prepared"]

FILE = "demo.gallery"  # in the folder of the run
PER_CHARACTER = 4  # drawings
STEP = 256
Progress = Callable[[int, int], None]


def prepared(run: Path | None = None, progress: Progress | None = None) -> tuple[Path, Path]:
    """The run and its gallery; what exists is not made again.

    All characters are enrolled, so that any drawing can be found; the metadata say which half was trained on.
    """
    folder = _newest_run() if run is None else run
    if not _calibrated(folder):
        room.calibrate(folder)
    place = folder / FILE
    with Gallery.open(place, folder) as gallery:
        drawings = glyphs.load(per_class=20)
        indices = [c * 20 + n for c in range(len(drawings.characters)) for n in range(PER_CHARACTER)]
        if "glyphs" not in gallery.stats()["sources"]:
            _enrol(gallery, drawings, indices, progress)
            gallery.remember(
                "glyphs"
            )  # only once all are enrolled: an interrupted enrolment is continued the next time
    return folder, place


def _calibrated(folder: Path) -> bool:
    try:
        return results.load_calibration(folder, encoder_info(folder).fingerprint)[0] is not None
    except ValueError:  # corrupt, or of an older version
        return False


def _enrol(gallery: Gallery, drawings: glyphs.Glyphs, indices: list[int], progress: Progress | None) -> None:
    learned = set(drawings.split()[0].characters)
    for start in range(0, len(indices), STEP):
        chosen = indices[start : start + STEP]
        labels = [drawings.characters[drawings.labels[i]] for i in chosen]
        names = [
            f"{unicodedata.name(label, 'unnamed').lower()}, drawing {i % 20 + 1}"
            for label, i in zip(labels, chosen, strict=True)
        ]
        metadata = [{"half": "learned from" if label in learned else "never seen"} for label in labels]
        gallery.enrol([drawings.images[i] for i in chosen], labels, metadata, names=names, keep=True)
        if progress is not None:
            progress(min(start + STEP, len(indices)), len(indices))


def _newest_run() -> Path:
    """The newest finished run on the glyphs in runs/."""
    runs = [path.parent for path in Path("runs").glob("glyphs*/encoder.json")]
    if not runs:
        raise ValueError(
            "--demo needs a glyphs run in runs/, and there is none; create it with make demo (or nearkin train glyphs)"
        )
    return max(runs, key=lambda folder: (folder / "encoder.json").stat().st_mtime)
