"""The picture of docs/explain.md: pairs of glyphs with their heat maps, by the run that `make demo` trains.

    python studies/matched_parts.py runs/glyphs

prints the similarity of each pair, the sum of both maps and what is missing, and writes docs/pictures/explain.png.
"""

import argparse
import io
from pathlib import Path

from matplotlib.figure import Figure

from nearkin import gallery
from nearkin.core import files
from nearkin.data import glyphs
from nearkin.report import heatmaps

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
# Two characters that share a part, and the numbers of their drawings.
PAIRS = (("P", 0, "R", 2), ("Q", 1, "O", 1), ("E", 0, "F", 0), ("→", 0, "↔", 2))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("run", help="the folder of a run on glyphs")
    options.add_argument("--out", type=Path, default=PICTURES / "explain.png")
    chosen = options.parse_args()
    figure = Figure(figsize=(2.5 * len(PAIRS), 3.3), facecolor="white")
    for column, (first, n, second, m) in enumerate(PAIRS):
        matched = gallery.explain(chosen.run, glyphs.draw(first, n), glyphs.draw(second, m), device="cpu")
        sums = " and ".join(f"{side.heat.sum():.6f}" for side in (matched.a, matched.b))
        missing = max(abs(side.missing) for side in (matched.a, matched.b))
        print(f"{first} {second}: similarity {matched.similarity:.6f}, sums {sums}, missing at most {missing:.1e}")
        scale = heatmaps.scale_of(matched.a.heat, matched.b.heat)
        for i, side in enumerate((matched.a, matched.b)):
            left, width = (column + 0.04 + 0.465 * i) / len(PAIRS), 0.45 / len(PAIRS)
            above, below = (figure.add_axes((left, bottom, width, 0.345)) for bottom in (0.5, 0.13))
            above.imshow(side.picture, cmap="gray", vmin=0, vmax=255)
            heatmaps.draw_heat(below, side.picture, side.heat, scale)
            for axes in (above, below):
                axes.set(xticks=[], yticks=[])
        figure.text((column + 0.5) / len(PAIRS), 0.89, f"similarity {matched.similarity:.2f}", ha="center", fontsize=11)
    words = "orange places add to the similarity, blue ones take from it; the places of each picture add up to it"
    figure.text(0.5, 0.035, words, ha="center", fontsize=10, color="#57616c")
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110, metadata={"Software": None})
    files.write_bytes(chosen.out, out.getvalue())
    print(f"wrote {chosen.out.name}")


if __name__ == "__main__":
    main()
