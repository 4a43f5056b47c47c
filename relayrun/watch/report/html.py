"""HTML for pages about runs: elements, tables, the style sheet, and the frame of a page.

All text that is not `Markup` is escaped, so the name of a run stays text. A content policy forbids scripts and network
access. The style sheet serves narrow and wide screens, light and dark, and paper.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from relayrun.watch.text import parse_column_header


class Markup(str):
    """Text that is markup, made by `tag`."""

    __slots__ = ()


VOID_ELEMENTS = frozenset({"meta", "line", "path", "rect", "br"})
"""Elements without content."""


def tag(name: str, /, *children: str | None, **attributes: str | float | None) -> Markup:
    """Return an element. Attributes that are None are omitted; `class_` means `class`, and `_` in names means `-`."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value), quote=True)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID_ELEMENTS and not children:
        return Markup(f"<{name}{given}>" if name in ("meta", "br") else f"<{name}{given}/>")
    return Markup(f"<{name}{given}>{join_markup(children)}</{name}>")


def join_markup(parts: Iterable[str | None]) -> Markup:
    """Concatenate the parts, with text escaped and None skipped."""
    return Markup("".join(part if isinstance(part, Markup) else escape(part) for part in parts if part is not None))


LIGHT_COLOURS = """
--ink:#1b1f24;--soft:#57606a;--paper:#ffffff;--panel:#f6f8fa;--rule:#d0d7de;--bad:#b42318;
--c0:#0b66c3;--c1:#c2410c;--c2:#15803d;--c3:#7e22ce;--c4:#b45309;--c5:#0e7490;--c6:#be185d;--c7:#4d7c0f;
--g0:#2563a8;--g1:#e0a11b;--g2:#7cc4d8;--g3:#8a63b8;--g4:#59a14f;--g5:#d1495b;--g6:#8f1d2c;--g7:#a3acb8;--g8:#24292f;
"""

DARK_COLOURS = """
--ink:#e6edf3;--soft:#9da7b3;--paper:#0d1117;--panel:#161b22;--rule:#3d444d;--bad:#ff8a7a;
--c0:#6cb6ff;--c1:#ff9b5e;--c2:#6bd68a;--c3:#d2a8ff;--c4:#f2c063;--c5:#67d5e8;--c6:#ff8fc0;--c7:#b5d66b;
--g0:#4a90d9;--g1:#e8b84a;--g2:#7fd0e4;--g3:#b08ee0;--g4:#77c26b;--g5:#f07182;--g6:#c23b4c;--g7:#69727d;--g8:#f0f6fc;
"""

STYLE_SHEET = f"""
:root{{color-scheme:light dark;{LIGHT_COLOURS}}}
@media (prefers-color-scheme:dark){{:root{{{DARK_COLOURS}}}}}
@media print{{:root{{color-scheme:light;{LIGHT_COLOURS}}} figure,table,.facts{{break-inside:avoid}}
 *{{print-color-adjust:exact;-webkit-print-color-adjust:exact}}}}
*{{box-sizing:border-box}}
body{{margin:0 auto;padding:1rem;max-width:90rem;background:var(--paper);color:var(--ink);
 font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;overflow-wrap:anywhere}}
h1{{font-size:1.5rem;margin:.2rem 0}} h2{{font-size:1.2rem;margin:2rem 0 .5rem;border-bottom:1px solid var(--rule)}}
h3{{font-size:1rem;margin:1.2rem 0 .4rem}} p{{margin:.3rem 0}} .soft{{color:var(--soft)}} .bad{{color:var(--bad)}}
.facts{{display:grid;grid-template-columns:repeat(auto-fit,minmax(9rem,1fr));gap:.5rem;margin:.8rem 0}}
.facts div{{background:var(--panel);border:1px solid var(--rule);border-radius:6px;padding:.45rem .55rem;
 font-size:.8rem;color:var(--soft);display:flex;flex-direction:column;justify-content:space-between}}
.facts b{{font-size:1.1rem;line-height:1.4;color:var(--ink)}} .facts small{{font-size:.8rem;font-weight:400}}
.charts{{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,32rem),1fr));gap:1rem 1.5rem}}
figure{{margin:0 0 .5rem;min-width:0}} figcaption{{font-size:.9rem;color:var(--soft);margin-bottom:.2rem}}
figcaption b{{color:var(--ink)}}
.chart{{display:grid;grid-template-columns:3.6rem minmax(0,1fr);grid-template-rows:12rem 1.3rem}}
.wide .chart{{grid-template-rows:16rem 1.3rem}}
.y,.x{{position:relative;font-size:.75rem;color:var(--soft)}}
.y span{{position:absolute;right:.35rem;transform:translateY(50%)}}
.x{{grid-column:2}} .x span{{position:absolute;transform:translateX(-50%);white-space:nowrap}}
.x .first{{transform:none}} .x .last{{transform:translateX(-100%)}}
.plot{{border-left:1px solid var(--rule);border-bottom:1px solid var(--rule);min-width:0}}
svg{{display:block;width:100%;height:100%;overflow:hidden}}
.key{{display:flex;flex-wrap:wrap;gap:.1rem .9rem;font-size:.8rem;padding-left:3.6rem}} .axis{{color:var(--soft)}}
.key i{{display:inline-block;width:.8em;height:.8em;margin-right:.35em;border-radius:2px;vertical-align:-.05em}}
.bar{{height:1.6rem;border-radius:4px;overflow:hidden;margin:.4rem 0}}
path,line{{vector-effect:non-scaling-stroke}} .line{{fill:none;stroke-width:1.3;stroke-linejoin:round}}
.dots{{fill:none;stroke-width:6;stroke-linecap:round}} .grid{{stroke:var(--rule);stroke-width:.6}}
.attempt{{stroke:var(--soft);stroke-width:1;stroke-dasharray:3 3}} .failed{{stroke:var(--bad);stroke-width:1.3}}
.restart{{stroke:var(--bad);stroke-width:1.3;stroke-dasharray:1.5 3}}
table{{border-collapse:collapse;width:100%;font-size:.85rem;margin:.4rem 0}}
th,td{{text-align:left;padding:.2rem .6rem .2rem 0;border-bottom:1px solid var(--rule);vertical-align:top}}
th{{color:var(--soft);font-weight:600;overflow-wrap:normal}} table:not(.many) td:first-child{{min-width:6.5em}}
@media (min-width:380px){{table:not(.many) .n{{white-space:nowrap}}}}
@media (min-width:1001px){{td.n{{white-space:nowrap}}}}
main+main,section+main{{margin-top:3rem}} .n{{text-align:right;font-variant-numeric:tabular-nums}}
pre{{background:var(--panel);border:1px solid var(--rule);border-radius:6px;padding:.6rem;font-size:.8rem;
 white-space:pre-wrap}}
@media screen and (max-width:1000px){{
 .many thead{{display:none}} .many,.many tbody,.many tr,.many td{{display:block;width:100%}}
 .many tr{{border-bottom:1px solid var(--rule);padding:.4rem 0}}
 .many td{{border:0;padding:.05rem 0;text-align:left!important}} .many td:empty{{display:none}}
 .many td[data-name]::before{{content:attr(data-name) ": ";color:var(--soft)}}
}}
{"".join(f".line.c{n},.dots.c{n}{{stroke:var(--c{n})}}i.c{n}{{background:var(--c{n})}}" for n in range(8))}
{"".join(f"path.g{n},rect.g{n}{{fill:var(--g{n})}}i.g{n}{{background:var(--g{n})}}" for n in range(9))}
""".strip()


MAX_TABLE_ROWS = 200
"""Maximum number of rows of a table: the newest; a line says how many there are."""


def html_table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    """Return a table of the newest rows; `|n` after a name marks a column of numbers.

    On a narrow screen a row of more than four columns becomes a list, with its column's name before each value.
    """
    heads = [(name, "n" if is_number else None) for name, is_number in map(parse_column_header, names)]
    body = [
        tag("tr", *(tag("td", text, class_=css, data_name=name) for text, (name, css) in zip(row, heads, strict=True)))
        for row in rows[-MAX_TABLE_ROWS:]
    ]
    head = tag("thead", tag("tr", *(tag("th", name, class_=css) for name, css in heads)))
    table = tag("table", head, tag("tbody", *body), class_="many" if len(names) > 4 else None)
    more = tag("p", f"The newest {MAX_TABLE_ROWS} of {len(rows):,}.", class_="soft")
    return join_markup([table, more if len(rows) > MAX_TABLE_ROWS else None])


CONTENT_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def html_document(title: str, *children: str | None) -> str:
    """Return a whole page."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=CONTENT_POLICY),
        tag("title", f"{title} – relayrun"),
        tag("style", Markup(STYLE_SHEET)),
    )
    return f"<!doctype html>\n{tag('html', head, tag('body', *children), lang='en')}\n"
