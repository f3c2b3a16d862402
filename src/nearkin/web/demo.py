"""`serve --demo`: the glyphs run of `make demo`, calibrated, with a gallery of characters to draw after."""

import unicodedata
from collections.abc import Callable
from pathlib import Path

from nearkin import gallery as room
from nearkin.data import glyphs
from nearkin.gallery import Gallery, results
from nearkin.gallery.items import encoder_info

__all__ = ["prepared"]

FILE = "demo.gallery"  # in the folder of the run
EACH = 4  # drawings of a character
STEP = 256
Progress = Callable[[int, int], None]


def prepared(run: Path | None = None, progress: Progress | None = None) -> tuple[Path, Path]:
    """The run and its gallery; what is there already is not made again.

    All characters are enrolled, so that whatever is drawn can be found; metadata say which half was learned from.
    """
    folder = _run() if run is None else run
    if not _calibrated(folder):
        room.calibrate(folder)
    place = folder / FILE
    with Gallery.open(place, folder) as gallery:
        whole = glyphs.load(per_class=20)
        wanted = [c * 20 + n for c in range(len(whole.characters)) for n in range(EACH)]
        if "glyphs" not in gallery.stats()["sources"]:
            _enrol(gallery, whole, wanted, progress)
            gallery.remember("glyphs")  # all of them: an enrolment that was stopped goes on the next time
    return folder, place


def _calibrated(folder: Path) -> bool:
    try:
        return results.load_calibration(folder, encoder_info(folder).fingerprint)[0] is not None
    except ValueError:  # damaged, or of an older version
        return False


def _enrol(gallery: Gallery, whole: glyphs.Glyphs, wanted: list[int], progress: Progress | None) -> None:
    learned = set(whole.split()[0].characters)
    for start in range(0, len(wanted), STEP):
        chosen = wanted[start : start + STEP]
        labels = [whole.characters[whole.labels[i]] for i in chosen]
        names = [
            f"{unicodedata.name(one, 'unnamed').lower()}, drawing {i % 20 + 1}"
            for one, i in zip(labels, chosen, strict=True)
        ]
        metadata = [{"half": "learned from" if one in learned else "never seen"} for one in labels]
        gallery.enrol([whole.images[i] for i in chosen], labels, metadata, names=names, keep=True)
        if progress is not None:
            progress(min(start + STEP, len(wanted)), len(wanted))


def _run() -> Path:
    """The newest finished run on the glyphs in runs/."""
    found = [path.parent for path in Path("runs").glob("glyphs*/encoder.json")]
    if not found:
        raise ValueError(
            "--demo needs a run on the glyphs in runs/, and there is none; make demo (or nearkin train glyphs) makes it"
        )
    return max(found, key=lambda folder: (folder / "encoder.json").stat().st_mtime)
