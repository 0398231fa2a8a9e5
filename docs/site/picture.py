"""Draw the picture of the idea: ``python docs/site/picture.py`` writes docs/idea.svg."""

from __future__ import annotations

from html import escape
from pathlib import Path

OUTPUT = Path(__file__).parents[1] / "idea.svg"
WIDTH, HEIGHT = 880, 310
INK, MUTED, LINE = "#1f2933", "#5f6c7b", "#9aa5b1"
COLOURS = ("#2f6fde", "#d9730d", "#2e8b57")
EXPERTS = (("legal", "week 1"), ("medical", "week 2"), ("code", "week 3"))
OUTPUTS = (
    ("merged", "one model of all experts", "export"),
    ("legal, again", "any expert, from the store", "export --readout expert:legal"),
    ("without medical", "exact, no re-merge", "remove medical"),
)


def text(
    x: float, y: float, content: str, size: int = 14, colour: str = INK, *, mono: bool = False, **style: str
) -> str:
    family = "ui-monospace, Menlo, Consolas, monospace" if mono else "Helvetica, Arial, sans-serif"
    extra = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
    font = f'font-family="{family}" font-size="{size}" fill="{colour}"{extra}'
    return f'<text x="{x}" y="{y}" {font}>{escape(content)}</text>'


def box(x: float, y: float, width: float, height: float, fill: str = "#ffffff", stroke: str = LINE) -> str:
    style = f'rx="8" fill="{fill}" stroke="{stroke}" stroke-width="1.5"'
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" {style}/>'


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    middle = (x1 + x2) / 2
    path = f"M{x1},{y1} C{middle},{y1} {middle},{y2} {x2 - 6},{y2}"
    return f'<path d="{path}" fill="none" stroke="{LINE}" stroke-width="1.8" marker-end="url(#head)"/>'


def experts() -> list[str]:
    parts = [text(24, 40, "Experts of one base", 15, font_weight="bold")]
    for row, ((name, week), colour) in enumerate(zip(EXPERTS, COLOURS, strict=True)):
        y = 60 + 80 * row
        parts += [
            box(24, y, 150, 56),
            f'<rect x="24" y="{y}" width="8" height="56" rx="4" fill="{colour}"/>',
            text(46, y + 25, name, 15),
            text(46, y + 44, week, 12, MUTED),
            arrow(174, y + 28, 330, 130 + 38 * row),
        ]
    return [*parts, text(226, 160, "add", 13, MUTED, mono=True)]


def store() -> list[str]:
    parts = [
        text(336, 40, "Store (size of one model)", 15, font_weight="bold"),
        box(336, 60, 200, 216, "#f5f7fa"),
    ]
    parts += [
        text(354, 92, "for each expert it keeps the", 12, MUTED),
        text(354, 108, "main directions of its change", 12, MUTED),
    ]
    for row, ((name, _), colour) in enumerate(zip(EXPERTS, COLOURS, strict=True)):
        y = 122 + 38 * row
        parts += [
            f'<rect x="354" y="{y}" width="164" height="26" rx="4" fill="{colour}" fill-opacity="0.16"/>',
            *(
                f'<rect x="{438 + 13 * bar}" y="{y + 21 - height}" width="8" height="{height}" fill="{colour}"/>'
                for bar, height in enumerate((16, 11, 8, 6, 4))
            ),
            text(364, y + 18, name, 13),
        ]
    return [*parts, text(354, 258, "history, digests, undo", 12, MUTED)]


def outputs() -> list[str]:
    parts = [text(640, 40, "What you get", 15, font_weight="bold")]
    for row, (name, meaning, command) in enumerate(OUTPUTS):
        y = 60 + 80 * row
        parts += [
            arrow(536, 130 + 38 * row, 634, y + 28),
            box(640, y, 216, 56),
            text(654, y + 24, name, 15),
            text(654, y + 43, meaning, 12, MUTED),
            text(654, y + 71, command, 11, MUTED, mono=True),
        ]
    return parts


def main() -> None:
    """Write the picture."""
    head = '<marker id="head" markerWidth="9" markerHeight="8" refX="3" refY="4" orient="auto">'
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img">',
        "<title>Experts arrive one by one, a store of constant size keeps them, one merged model is written</title>",
        f'<defs>{head}<path d="M0,0 L8,4 L0,8 z" fill="{LINE}"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="12" fill="#ffffff"/>',
        *experts(),
        *store(),
        *outputs(),
        "</svg>",
    ]
    OUTPUT.write_text("\n".join(body) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
