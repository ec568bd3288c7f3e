#!/usr/bin/env python3
"""Makes crates/server/page/math.woff2, the font for formulas of the server's page: STIX Two Math with what math.js can write, and all
sizes and pieces of brackets, roots and large operators.

    npm pack @fontsource/stix-two-math && tar xf fontsource-stix-two-math-*.tgz
    pip install fonttools brotli
    python3 scripts/server/math-font.py package/files/stix-two-math-latin-400-normal.woff2
"""

import pathlib
import re
import sys

from fontTools import subset
from fontTools.ttLib import TTFont

PAGE = pathlib.Path(__file__).resolve().parents[2] / "crates/server/page"
LICENCE = "This Font Software is licensed under the SIL Open Font License, Version 1.1: https://openfontlicense.org"


def characters() -> set[int]:
    """Letters and signs of plain text, everything that stands in math.js, and the letters that stand for styles."""
    wanted = set(range(0x20, 0x7F)) | set(range(0xA0, 0x100)) | {ord(c) for c in (PAGE / "math.js").read_text()}
    # Browsers draw a single letter of a formula, Greek ones too, as its italic sign; `\\mathbf` and others use theirs.
    wanted |= set(range(0x1D400, 0x1D4D0)) | set(range(0x1D4D0, 0x1D504)) | set(range(0x1D538, 0x1D56C)) | set(range(0x1D56C, 0x1D5A0))
    wanted |= set(range(0x1D670, 0x1D6A4)) | set(range(0x1D6A4, 0x1D7CC)) | set(range(0x1D7CE, 0x1D7D8)) | {0x210E}
    wanted |= set(range(0x370, 0x400)) | {ord(c) for c in "‖⟨⟩⌊⌋⌈⌉⟦⟧⎰⎱√∛⏞⏟⎴⎵‾¯ˆ˜→←↔∕−′″‴⁗…⋯"}
    return wanted


def main(source: str) -> None:
    # Without the time of this run, the same input gives the same file.
    font = TTFont(source, recalcTimestamp=False)
    options = subset.Options()
    options.layout_features = ["ssty", "dtls", "flac"]
    options.hinting = False
    options.name_IDs = [0, 1, 2, 4, 5, 6, 13, 14]
    options.notdef_outline = True
    options.flavor = "woff2"
    options.drop_tables += ["GPOS", "GDEF", "gasp"]
    cutter = subset.Subsetter(options)
    cutter.populate(unicodes=characters())
    cutter.subset(font)
    font["name"].setName(LICENCE, 13, 3, 1, 0x409)
    to = PAGE / "math.woff2"
    subset.save_font(font, str(to), options)
    print(f"{to}: {to.stat().st_size} bytes, {len(font.getGlyphOrder())} glyphs, copyright: {font['name'].getDebugName(0)}")


if __name__ == "__main__":
    if len(sys.argv) != 2 or re.match("-", sys.argv[1]):
        sys.exit(__doc__)
    main(sys.argv[1])
