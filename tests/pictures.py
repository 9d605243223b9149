"""Draw the pictures of the README: rows as `finetune inspect` shows them, and the top of a report.

python -m tests.pictures data.jsonl MODEL RUN
"""

import html
import re
import sys
from pathlib import Path

from matplotlib import font_manager
from PIL import Image, ImageDraw, ImageFont

from finetune.reports.inspection import inspect, recipe_of_data
from finetune.reports.page import report
from finetune.runs.run import Run

FOLDER = Path(__file__).parent.parent / "docs/images"
COLUMNS, SIZE, MARGIN = 96, 22, 28
PAPER, GREY, GREEN, BAND = "#ffffff", "#5b6776", "#0a5c2b", "#d9f2e1"


def draw_rows(data: str, model: str, rows: int = 2) -> None:
    """Write `inspect.png`: trained tokens in green."""
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
    image.save(FOLDER / "inspect.png", optimize=True)


def draw_report(run: Run) -> None:
    """Write `report.svg`: heading, key figures and curves of the page, with its style."""
    page = report(run).read_text()
    style = re.findall(r":root \{.*?\}", page, re.DOTALL)[:1]
    style += re.findall(r"svg [^{}\s][^{}]*\{[^}]*\}", page.partition("</style>")[0])
    parts = [f"<style>{' '.join(style)} .ink {{ fill: var(--ink) !important; }}</style>"]
    parts.append('<rect width="1000" height="1040" style="fill: var(--card)"/>')
    (title,), (verdict,) = re.findall("<h1>(.*)</h1>", page), re.findall('verdict">(.*)</p>', page)
    parts.append(_text(30, 46, title, 24, "ink", "bold") + _text(30, 74, verdict, 15, "ink"))
    tiles = re.findall(r"<dt>(.*)</dt><dd>(.*) <small>(.*)</small>", page)
    for number, (name, value, detail) in enumerate(tiles):
        x = 30 + 138 * number
        parts += [_text(x, 112, name, 12), _text(x, 136, value, 19, "ink", "bold")]
        parts.append(_text(x, 154, detail, 12))
    places = [(30, 200), (30, 570), (510, 570), (30, 815), (510, 815)]
    charts = re.findall(r"<figcaption>(.*?)\n.*?<svg[^>]*>(.*?)</svg>", page, re.DOTALL)
    for (x, y), (name, drawing) in zip(places, charts, strict=False):
        parts.append(_text(x, y - 6, name, 13))
        parts.append(f'<g transform="translate({x} {y})">{drawing}</g>')
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1000 1040" font-size="12"'
    text = f'{head} font-family="system-ui, sans-serif">\n' + "\n".join(parts) + "\n</svg>\n"
    (FOLDER / "report.svg").write_text(text)


def _text(x: int, y: int, text: str, size: int, kind: str = "", weight: str = "normal") -> str:
    shown = html.escape(html.unescape(text))
    look = f'font-size="{size}" font-weight="{weight}"'
    return f'<text x="{x}" y="{y}" class="{kind}" {look}>{shown}</text>'


if __name__ == "__main__":
    draw_rows(sys.argv[1], sys.argv[2])
    draw_report(Run(Path(sys.argv[3])))
