"""A few SVG shapes in one style: shapes go in, the text of a file comes out.

Colours are those of the pages that `piper.view` writes. A picture has its own background and
follows the reader's choice of light or dark mode, so that it fits on any page.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape

FONT = "ui-sans-serif, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace"
STYLE = f"""
text {{ font: 12px {FONT}; fill: #14181f; }}
.paper {{ fill: #ffffff; stroke: #dfe3e8; }}
.panel {{ fill: #f7f8fa; stroke: #dfe3e8; }}
.band {{ fill: #eaf0f8; stroke: #c5d3e6; }}
.tint {{ fill: #f6efe2; stroke: #e3d3b0; }}
.quiet {{ fill: #566070; }}
.small {{ font-size: 11px; }}
.strong {{ font-weight: 600; }}
.title {{ font-size: 13px; font-weight: 600; }}
.code {{ font-family: {MONO}; font-size: 11.5px; }}
.on {{ fill: #ffffff; }}
.ink {{ fill: #14181f; }}
.F {{ fill: #2e72b8; }} .B {{ fill: #1b9e77; }} .BI {{ fill: #74c3ea; }} .BW {{ fill: #e8a61c; }}
.F2 {{ fill: #a9c7e4; }} .B2 {{ fill: #a0d8c6; }}
.BI2 {{ fill: #c5e7f7; }} .BW2 {{ fill: #f5d996; }}
.talk {{ fill: #fbe9f1; stroke: #b5457c; }}
.state {{ fill: #e9e6f4; stroke: #6a5aa8; }}
.edge {{ fill: none; stroke: #66707f; stroke-width: 1.4; }}
.soft {{ fill: none; stroke: #a3abb7; stroke-width: 1.2; stroke-dasharray: 3 3; }}
.bold {{ fill: none; stroke: #b3261e; stroke-width: 2; }}
.head {{ fill: #66707f; }} .softhead {{ fill: #a3abb7; }} .boldhead {{ fill: #b3261e; }}
.axis {{ stroke: #dfe3e8; stroke-width: 1; }}
.red {{ fill: #b3261e; }}
@media (prefers-color-scheme: dark) {{
text {{ fill: #eef1f5; }}
.paper {{ fill: #171c24; stroke: #2a323e; }}
.panel {{ fill: #1e2530; stroke: #2a323e; }}
.band {{ fill: #1f2c3d; stroke: #34506f; }}
.tint {{ fill: #2d281d; stroke: #5d4f2c; }}
.quiet {{ fill: #a3aebc; }}
.on {{ fill: #ffffff; }}
.ink {{ fill: #14181f; }}
.F2 {{ fill: #7ea6cd; }} .B2 {{ fill: #74bda6; }}
.BI2 {{ fill: #a9d8ee; }} .BW2 {{ fill: #e6c67a; }}
.talk {{ fill: #3a2430; stroke: #d983ac; }}
.state {{ fill: #2a2740; stroke: #9d90d6; }}
.edge {{ stroke: #94a0b0; }} .soft {{ stroke: #5d6877; }} .bold {{ stroke: #ff8a80; }}
.head {{ fill: #94a0b0; }} .softhead {{ fill: #5d6877; }} .boldhead {{ fill: #ff8a80; }}
.axis {{ stroke: #2a323e; }}
.red {{ fill: #ff8a80; }}
}}
"""
_HEADS = "".join(
    f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
    f'markerUnits="userSpaceOnUse" orient="auto"><path class="{name}" d="M0 0.6 8 4 0 7.4z"/>'
    "</marker>"
    for name in ("head", "softhead", "boldhead")
)
_HEAD_OF = {"edge": "head", "soft": "softhead", "bold": "boldhead"}


@dataclass
class Picture:
    """A list of shapes, on a sheet that is as large as they need."""

    parts: list[str] = field(default_factory=list)
    right: float = 0.0
    bottom: float = 0.0

    def grow(self, x: float, y: float) -> None:
        self.right, self.bottom = max(self.right, x), max(self.bottom, y)

    def rect(
        self, x: float, y: float, width: float, height: float, look: str, radius: float = 5
    ) -> None:
        self.parts.append(
            f'<rect class="{look}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
            f'rx="{radius:g}"/>'
        )
        self.grow(x + width, y + height)

    def text(self, x: float, y: float, words: str, look: str = "", anchor: str = "start") -> None:
        place = "" if anchor == "start" else f' text-anchor="{anchor}"'
        kind = f' class="{look}"' if look else ""
        keep = ' xml:space="preserve"' if "  " in words else ""
        self.parts.append(f'<text{kind}{keep} x="{x:g}" y="{y:g}"{place}>{escape(words)}</text>')

    def path(self, way: str, look: str = "edge", *, arrow: bool = True) -> None:
        head = f' marker-end="url(#{_HEAD_OF[look]})"' if arrow else ""
        self.parts.append(f'<path class="{look}" d="{way}"{head}/>')

    def line(self, x: float, y: float, to_x: float, to_y: float, look: str = "axis") -> None:
        self.parts.append(
            f'<line class="{look}" x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}"/>'
        )

    def svg(self, said: str, margin: float = 16) -> str:
        """The text of the file; ``said`` describes the picture in words."""
        width, height = self.right + margin, self.bottom + margin
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
            f'width="{width:g}" height="{height:g}" role="img" aria-label="{escape(said)}">'
            f"<style>{STYLE}</style><defs>{_HEADS}</defs>"
            f'<rect class="paper" x="0.5" y="0.5" width="{width - 1:g}" height="{height - 1:g}" '
            f'rx="8"/>\n' + "\n".join(self.parts) + "\n</svg>\n"
        )
