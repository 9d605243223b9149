"""Draw the picture of `finetune inspect` for the README.

python -m tests.pictures data.jsonl MODEL
"""

import re
import sys
from pathlib import Path

from matplotlib import font_manager
from PIL import Image, ImageDraw, ImageFont

from finetune.reports.inspection import inspect, recipe_of_data

PICTURE = Path(__file__).parent.parent / "docs/images/inspect.png"
COLUMNS, SIZE, MARGIN = 96, 22, 28
PAPER, GREY, GREEN, BAND = "#ffffff", "#5b6776", "#0a5c2b", "#d9f2e1"


def draw(data: str, model: str, rows: int = 2) -> None:
    """Rows as `finetune inspect` shows them: trained tokens in green."""
    inspection = inspect(recipe_of_data(data, model), rows)
    letters: list[tuple[str, bool]] = []
    for row, (document, *_) in enumerate(inspection.rows, 1):
        heading = f"row {row}  {document.place}  {document.counted}\n"
        pieces = [(heading, False), *((each.text, each.trained) for each in document.pieces)]
        letters += [(each, trained) for text, trained in pieces for each in text]
        letters += [("\n", False)] * 2
    cells: list[tuple[int, int, str, bool]] = []
    column = line = 0
    for word in re.finditer(r"\n|[^\S\n]|\S+", "".join(each for each, _ in letters)):
        if word[0] == "\n" or column + len(word[0]) > COLUMNS:
            column, line = 0, line + 1
        if word[0] != "\n":
            inside = letters[word.start() : word.end()]
            cells += [(column + n, line, *cell) for n, cell in enumerate(inside)]
            column += len(inside)
    font = ImageFont.truetype(font_manager.findfont("DejaVu Sans Mono"), SIZE)
    width, height = font.getlength("M"), round(1.4 * SIZE)
    lines = max(line for _, line, _, _ in cells) + 1
    size = (round(COLUMNS * width) + 2 * MARGIN, lines * height + 2 * MARGIN)
    image = Image.new("RGB", size, PAPER)
    brush = ImageDraw.Draw(image)
    for column, line, letter, trained in cells:
        x, y = MARGIN + column * width, MARGIN + line * height
        if trained:
            brush.rectangle((x, y, x + width, y + height - 1), BAND)
        brush.text((x, y + 2), letter, GREEN if trained else GREY, font)
    image.save(PICTURE, optimize=True)


if __name__ == "__main__":
    draw(*sys.argv[1:3])
