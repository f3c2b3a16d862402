"""Sections that show items: retrieval, map, distances, worst classes, confused pairs, suspect labels."""

from dataclasses import dataclass

import numpy as np
import torch

from nearkin.report import charts, format, heat_section, maps
from nearkin.report.charts import Bars
from nearkin.report.findings import Findings
from nearkin.report.format import escape, name_html, number, share
from nearkin.report.sampling import Ints, Row, Sample
from nearkin.report.thumbnails import Thumbnails, encoded

__all__ = ["Context", "confused", "distances", "grid", "label_errors", "near", "plane", "quality", "worst"]

QUALITY_BINS, QUALITY_SHOWN = 40, 9  # of the histogram; items of the lowest, and of the highest quality
MAX_ERRORS = 12  # suspect labels shown
MAX_TIP = 60  # characters of a name on the map


@dataclass(frozen=True)
class Context:
    """The input of every section here."""

    findings: Findings
    sample: Sample
    thumbnails: Thumbnails
    seed: int

    def name(self, kind: int) -> str:
        return self.findings.classes[kind]

    def kind(self, item: int) -> int:
        assert self.findings.labels is not None
        return int(self.findings.labels[item])

    def members(self, kind: int) -> Ints:
        """Items of a class that can be shown."""
        assert self.findings.labels is not None
        kinds = self.findings.labels.cpu().numpy()
        return self.sample.items[np.flatnonzero(kinds[self.sample.items] == kind)]

    def picture(self, item: int, alt: str, side: int = 96) -> str:
        """An item's thumbnail, or its name where there is none."""
        address = self.thumbnails.address(item, side)
        name = escape(format.short(self.findings.names[item]))
        if address is None:
            last = format.short(str(self.findings.names[item]).rsplit("/", 1)[-1], 36)  # the title has its folder
            return f'<span class="noimg" title="{name}">{name_html(last)}</span>'
        return f'<img src="{address}" alt="{escape(format.short(alt))}" title="{name}" loading="lazy" decoding="async">'

    def pictures(self, kind: int, most: int) -> str:
        """Some pictures of a class, spread over its items."""
        if not self.thumbnails:
            return ""
        members = self.members(kind)
        some = members[np.linspace(0, len(members) - 1, min(most, len(members))).round().astype(int)].tolist()
        return f'<span class="thumbs">{"".join(self.picture(i, f"an item of {self.name(kind)}") for i in some)}</span>'


def grid(context: Context) -> str:
    groups, matched = [], _matched(context)
    for group in context.sample.groups:
        rows = "".join(_row(context, row) + matched.get(row.query, "") for row in group.rows)
        groups.append(f'<h3>{escape(group.title).replace(" %", chr(0x202F) + "%")}</h3><div class="grid">{rows}</div>')
    return "".join(groups)


def _matched(context: Context) -> dict[int, str]:
    """Per query, which part of it matched its nearest wrong neighbour, or the nearest one."""
    rows = [row for group in context.sample.groups for row in group.rows if row.neighbours]
    if context.findings.explain is None or not rows:
        return {}
    labelled = context.findings.labels is not None
    shown = {}
    for row in rows:
        wrong = [i for i in row.neighbours if labelled and context.kind(i) != context.kind(row.query)]
        shown[row.query] = (wrong or row.neighbours)[0], bool(wrong) and wrong[0] == row.neighbours[0]
    pairs = [(query, neighbour) for query, (neighbour, _) in shown.items()]

    def name(item: int) -> str:
        return context.name(context.kind(item)) if labelled else str(context.findings.names[item]).rsplit("/", 1)[-1]

    return {
        query: heat_section.details(heat, (name(query), name(neighbour)), opened=shown[query][1])
        for (query, neighbour), heat in zip(pairs, context.findings.explain(pairs), strict=False)
    }


def _row(context: Context, row: Row) -> str:
    labelled = context.findings.labels is not None
    query = context.name(context.kind(row.query)) if labelled else _target(context, row.query)
    first = context.picture(row.query, f"query: {query}")
    cells = []
    worst = max(row.label_distance, default=0.0)
    for i, (item, similarity) in enumerate(zip(row.neighbours, row.similarity, strict=True)):
        if labelled:
            correct = context.kind(item) == context.kind(row.query)
            sign, style = ("✓", "right") if correct else ("✗", "wrong")
            name = context.name(context.kind(item))
            caption = f'<span class="sign" aria-hidden="true">{sign}</span> {format.caption(name)}'
            tip = f"{style}: {format.short(name)}, cosine {similarity:.2f}"
        elif row.label_distance:
            distance, style, name = row.label_distance[i], "graded", _target(context, item)
            caption = f"Δ {number(distance)}{charts.bar(distance / worst if worst else 0)}"
            tip = f"label distance {number(distance)}, target {name}"
        else:
            style, name, caption, tip = "graded", "", f"{similarity:.2f}", f"cosine {similarity:.2f}"
        cells.append(
            f'<figure class="{style}">{context.picture(item, tip)}'
            f'<figcaption title="{escape(tip)}">{caption}</figcaption></figure>'
        )
    return (
        f'<div class="row"><figure class="query">{first}<figcaption title="{escape(format.short(query))}">'
        f'{format.caption(query or "query")}</figcaption></figure><div class="near">{"".join(cells)}</div></div>'
    )


def _target(context: Context, item: int) -> str:
    targets = context.findings.targets
    if targets is None:
        return ""
    values = targets[item].reshape(-1).tolist()
    return ", ".join(number(v) for v in values[:3]) + (", …" if len(values) > 3 else "")


def plane(context: Context) -> tuple[str, str]:
    """The map and its method; "" where nothing can be mapped."""
    findings, items = context.findings, context.sample.mapped
    if len(items) < 2:
        return "", ""
    flat, method = maps.plane(findings.embeddings[torch.from_numpy(items)], context.seed)
    if findings.labels is None:
        targets = np.zeros(len(items))
        if findings.targets is not None:
            targets = findings.targets.reshape(len(findings.embeddings), -1)[:, 0].double().cpu().numpy()[items]
        tips = [f"{format.short(findings.names[i], MAX_TIP)}: {_target(context, i)}" for i in items.tolist()]
        return maps.targets_map(flat, targets.tolist(), tips), method
    kinds = [context.kind(i) for i in items.tolist()]
    badges = []
    for kind in sorted(set(kinds)):
        members = [i for i, k in zip(items.tolist(), kinds, strict=True) if k == kind]
        thumbnail = context.thumbnails.address(_typical(context, members), 48)
        badges.append(maps.Badge(kind, context.name(kind), thumbnail))
    tips = [
        f"{format.short(context.name(k), MAX_TIP)} · {format.short(findings.names[i], MAX_TIP)}"
        for i, k in zip(items.tolist(), kinds, strict=True)
    ]
    chips = "".join(
        f'<button type="button" data-c="{badge.kind}" aria-pressed="false">'
        + (f'<img src="{badge.address}" alt="">' if badge.address else "")
        + f"{name_html(format.short(badge.name, 40))}</button>"
        for badge in badges
    )
    legend = f'<div class="chips" role="group" aria-label="Show one class on the map">{chips}</div>'
    return f'<div class="mapbox">{maps.classes_map(flat, kinds, tips, badges)}{legend}</div>', method


def _typical(context: Context, items: list[int]) -> int:
    """The item nearest to the mean of its class."""
    x = torch.nn.functional.normalize(context.findings.embeddings[items].double().cpu(), dim=1)
    return items[int((x @ x.mean(0)).argmax())]


def distances(context: Context) -> str:
    diagnosis = context.sample.diagnosis
    if diagnosis is None:
        return ""
    edges = diagnosis["intra_histogram"]["edges"]
    groups = [
        Bars("different classes", "other", diagnosis["inter_histogram"]["counts"], diagnosis["inter_mean"]),
        Bars("same class", "main", diagnosis["intra_histogram"]["counts"], diagnosis["intra_mean"]),
    ]
    title = "Distances between items of the same class and of different classes"
    wide, narrow = (
        charts.histogram(edges, groups, title=title, x_label="distance of unit embeddings", width=width)
        for width in (2 * charts.WIDTH, charts.WIDTH)
    )
    facts = [
        ("alignment", diagnosis["alignment"], "mean squared distance of positive pairs; lower is tighter"),
        ("uniformity", diagnosis["uniformity"], "lower is more evenly spread"),
        ("effective rank", diagnosis["effective_rank"], "dimensions in use"),
        ("hubness", diagnosis["hubness"], "skewness of how often an item is a neighbour"),
    ]
    rows = "".join(f"<div><dt>{n}</dt><dd>{number(v)} <small>{why}</small></dd></div>" for n, v, why in facts)
    return f'<figure class="wide">{wide}</figure><figure class="narrow">{narrow}</figure><dl class="facts">{rows}</dl>'


def quality(context: Context) -> str:
    """The lengths of the embeddings, and the items of the least and the greatest; "" where all have length 1."""
    if not context.findings.free_length or not len(context.sample.items):
        return ""
    items = context.sample.items
    lengths = context.findings.embeddings[torch.from_numpy(items)].double().norm(dim=1).cpu().numpy()
    low, high = float(lengths.min()), float(lengths.max())
    counts, edges = np.histogram(lengths, QUALITY_BINS, (low, high) if high > low else (low - 0.5, low + 0.5))
    bars = [Bars("test items", "main", counts.tolist(), float(lengths.mean()))]
    words = {"title": "Quality of the test items", "x_label": "length of the embedding", "counted": "items"}
    wide, narrow = (
        charts.histogram(edges.tolist(), bars, width=width, **words) for width in (2 * charts.WIDTH, charts.WIDTH)
    )
    order = np.argsort(lengths, kind="stable")
    groups = []
    for title, places in (("Lowest", order[:QUALITY_SHOWN]), ("Highest", order[::-1][:QUALITY_SHOWN])):
        cells = []
        for item, length in zip(items[places].tolist(), lengths[places].tolist(), strict=True):
            picture = context.picture(item, f"quality {number(length)}")
            cells.append(f"{picture}<figcaption>{number(length)}</figcaption>")
        others = "".join(f'<figure class="graded">{cell}</figure>' for cell in cells[1:])
        groups.append(
            f'<h3>{title}</h3><div class="grid"><div class="row"><figure class="graded">{cells[0]}</figure>'
            f'<div class="near">{others}</div></div></div>'
        )
    plots = f'<figure class="wide">{wide}</figure><figure class="narrow">{narrow}</figure>'
    return plots + "".join(groups)


def worst(context: Context) -> str:
    rows = context.sample.diagnosis["worst_classes"] if context.sample.diagnosis else []
    lines = "".join(
        f'<li>{context.pictures(row["class"], 4)}<span class="what">{format.caption(context.name(row["class"]))}</span>'
        f"{charts.bar(row['r_precision'])}"
        f'<span class="much">{share(row["r_precision"])} <small>R@1 {share(row["recall@1"])} · '
        f"{format.count(row['items'], 'item', 'items')}</small></span></li>"
        for row in rows
    )
    return f'<ol class="bars">{lines}</ol>' if lines else ""


def confused(context: Context) -> str:
    rows = context.sample.diagnosis["confused_pairs"] if context.sample.diagnosis else []
    lines = []
    for row in rows:
        sides = [
            f'<span class="side">{context.pictures(kind, 2)}'
            f'<span class="what">{format.caption(context.name(kind))}</span></span>'
            for kind in row["classes"]
        ]
        pair = '<span class="arrow" aria-label="and">↔</span>'.join(sides)
        lines.append(
            f'<li><span class="pair">{pair}</span>{charts.bar(row["share"], "wrong")}'
            f'<span class="much">{share(row["share"])} '
            f"<small>{format.count(row['neighbours'], 'neighbour', 'neighbours')}</small></span></li>"
        )
    return f'<ol class="bars pairs">{"".join(lines)}</ol>' if lines else ""


def label_errors(context: Context) -> str:
    rows = context.sample.diagnosis["label_errors"] if context.sample.diagnosis else []
    cards = []
    for row in rows[:MAX_ERRORS]:
        item, label, other = row["item"], context.name(row["class"]), context.name(row["suggested"])
        cards.append(
            f"<li>{context.picture(item, f'suspect item, labelled {label}')}"
            f'<div><p class="small soft">{name_html(context.findings.names[item])}</p>'
            f"<p>labelled <b>{format.caption(label)}</b></p>"
            f"<p>{format.percent(round(row['agreement'], 2))} of its neighbours: <b>{format.caption(other)}</b></p>"
            f"{context.pictures(row['suggested'], 3)}</div></li>"
        )
    if not cards:
        return ""
    note = f"{MAX_ERRORS} of {number(len(rows))} shown, most certain first."
    return f'<ul class="cards">{"".join(cards)}</ul>' + (
        f'<p class="small soft">{note}</p>' if len(rows) > MAX_ERRORS else ""
    )


def near(context: Context) -> str:
    """Pairs of near-duplicates side by side, with their parts."""
    cards = []
    for pair in context.findings.near:
        sides = "".join(
            f'<span class="side"><img src="{encoded(pixels)}" alt="{escape(format.short(name))}" loading="lazy">'
            f'<span class="what">{name_html(format.short(name, 60))} <small>{escape(part)}</small></span></span>'
            for pixels, name, part in zip(pair.pictures, pair.names, pair.parts, strict=True)
        )
        gone = ", the first dropped" if pair.dropped else ""
        much = f'<span class="much">{pair.similarity:.3f}<small>{gone}</small></span>'
        cards.append(f'<li><span class="pair">{sides}</span>{much}</li>')
    return f'<ol class="bars pairs">{"".join(cards)}</ol>' if cards else ""
