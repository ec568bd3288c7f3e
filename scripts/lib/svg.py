"""What the charts and drawings of the book share: their width, their style, their ground."""
import html

# As wide as a phone shows without making letters too small.
WIDTH = 480
ORANGE, BLUE, GREY, GREEN, PURPLE = "#d9622b", "#5b84ab", "#9a9a9a", "#5d9a5b", "#9b6bb3"
# Pictures bring their own ground: a page may be light where the system is dark.
STYLE = """<style>
text { font: 14px system-ui, sans-serif; fill: #222 } .ground { fill: #fff; stroke: #ddd }
.title { font-weight: 600; font-size: 16px } .small { font-size: 12px; fill: #555 } .grid { stroke: #ddd }
.box { fill: #f4f1ee; stroke: #b9b2aa } .line { stroke: #777; fill: none } .tip { fill: #777 } .on { fill: #fff }
@media (prefers-color-scheme: dark) {
  text { fill: #eee } .ground { fill: #1c1f26; stroke: #3a3f4a } .small { fill: #b4b8c0 } .grid { stroke: #3a3f4a }
  .box { fill: #2a2e37; stroke: #555c69 } .line { stroke: #aab } .tip { fill: #aab } .on { fill: #fff }
}
</style>"""


def svg(height, title, parts):
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" role="img">'
    ground = f'<rect class="ground" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="6"/>'
    return "\n".join([head, f"<title>{html.escape(title)}</title>", STYLE, ground, *parts, "</svg>", ""])


def text(x, y, words, kind="", anchor="start"):
    kind = f' class="{kind}"' if kind else ""
    anchor = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text{kind} x="{x}" y="{y}"{anchor}>{html.escape(words)}</text>'


def box(x, y, width, height, *lines, fill=None, small=None):
    """A box with lines of text in its middle; the first line is plain, those behind it small."""
    look = f'fill="{fill}"' if fill else 'class="box"'
    out = [f'<rect {look} x="{x}" y="{y}" width="{width}" height="{height}" rx="4"/>']
    top = y + height / 2 - 8 * (len(lines) - 1) + 5
    for i, line in enumerate(lines):
        kind = "on" if fill else "small" if i and small is not False else ""
        out.append(text(x + width / 2, top + 16 * i, line, kind, "middle"))
    return out


def arrow(x1, y1, x2, y2):
    """A line with a tip at its end, horizontal or vertical."""
    dx, dy = (x2 > x1) - (x2 < x1), (y2 > y1) - (y2 < y1)
    tip = f"{x2},{y2} {x2 - 7 * dx - 4 * dy},{y2 - 7 * dy - 4 * dx} {x2 - 7 * dx + 4 * dy},{y2 - 7 * dy + 4 * dx}"
    return [f'<line class="line" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>', f'<polygon class="tip" points="{tip}"/>']
