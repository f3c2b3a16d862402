"""Sections of the page that show items: retrieval, map, distances, worst classes, confused pairs, suspect labels."""

from dataclasses import dataclass

import numpy as np
import torch

from nearkin.report import charts, format, maps
from nearkin.report.charts import Bars
from nearkin.report.findings import Findings
from nearkin.report.format import escape, named, number, share
from nearkin.report.sampling import Choice, Ints, Row
from nearkin.report.thumbnails import Thumbnails

__all__ = ["Shown", "confused", "distances", "grid", "label_errors", "plane", "worst"]

ERRORS = 12  # suspect labels shown
TIP = 60  # characters of a name on the map


@dataclass(frozen=True)
class Shown:
    """What every section here looks at."""

    findings: Findings
    choice: Choice
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
        return self.choice.items[np.flatnonzero(kinds[self.choice.items] == kind)]

    def picture(self, item: int, alt: str, side: int = 96) -> str:
        """An item's thumbnail, or its name where there is none."""
        address = self.thumbnails.address(item, side)
        name = escape(format.short(self.findings.names[item]))
        if address is None:
            last = format.short(str(self.findings.names[item]).rsplit("/", 1)[-1], 36)  # the folder is in the title
            return f'<span class="noimg" title="{name}">{named(last)}</span>'
        return f'<img src="{address}" alt="{escape(format.short(alt))}" title="{name}" loading="lazy" decoding="async">'

    def pictures(self, kind: int, most: int) -> str:
        """Some of a class, spread over its items."""
        if not self.thumbnails:
            return ""
        members = self.members(kind)
        some = members[np.linspace(0, len(members) - 1, min(most, len(members))).round().astype(int)].tolist()
        return f'<span class="thumbs">{"".join(self.picture(i, f"an item of {self.name(kind)}") for i in some)}</span>'


def grid(shown: Shown) -> str:
    groups = []
    for group in shown.choice.groups:
        rows = "".join(_row(shown, row) for row in group.rows)
        groups.append(f'<h3>{escape(group.title).replace(" %", chr(0x202F) + "%")}</h3><div class="grid">{rows}</div>')
    return "".join(groups)


def _row(shown: Shown, row: Row) -> str:
    labelled = shown.findings.labels is not None
    query = shown.name(shown.kind(row.query)) if labelled else _target(shown, row.query)
    first = shown.picture(row.query, f"query: {query}")
    cells = []
    worst = max(row.label_distance, default=0.0)
    for i, (item, close) in enumerate(zip(row.neighbours, row.similarity, strict=True)):
        if labelled:
            right = shown.kind(item) == shown.kind(row.query)
            sign, said, style = ("✓", "right", "right") if right else ("✗", "wrong", "wrong")
            name = shown.name(shown.kind(item))
            caption = f'<span class="sign" aria-hidden="true">{sign}</span> {format.caption(name)}'
            tip = f"{said}: {format.short(name)}, cosine {close:.2f}"
        elif row.label_distance:
            far, style, name = row.label_distance[i], "graded", _target(shown, item)
            caption = f"Δ {number(far)}{charts.bar(far / worst if worst else 0)}"
            tip = f"label distance {number(far)}, target {name}"
        else:
            style, name, caption, tip = "graded", "", f"{close:.2f}", f"cosine {close:.2f}"
        cells.append(
            f'<figure class="{style}">{shown.picture(item, tip)}'
            f'<figcaption title="{escape(tip)}">{caption}</figcaption></figure>'
        )
    return (
        f'<div class="row"><figure class="query">{first}<figcaption title="{escape(format.short(query))}">'
        f'{format.caption(query or "query")}</figcaption></figure><div class="near">{"".join(cells)}</div></div>'
    )


def _target(shown: Shown, item: int) -> str:
    targets = shown.findings.targets
    if targets is None:
        return ""
    values = targets[item].reshape(-1).tolist()
    return ", ".join(number(v) for v in values[:3]) + (", …" if len(values) > 3 else "")


def plane(shown: Shown) -> tuple[str, str]:
    """The map and who made it; "" where nothing can be mapped."""
    findings, items = shown.findings, shown.choice.mapped
    if len(items) < 2:
        return "", ""
    flat, by = maps.plane(findings.embeddings[torch.from_numpy(items)], shown.seed)
    if findings.labels is None:
        targets = np.zeros(len(items))
        if findings.targets is not None:
            targets = findings.targets.reshape(len(findings.embeddings), -1)[:, 0].double().cpu().numpy()[items]
        tips = [f"{format.short(findings.names[i], TIP)}: {_target(shown, i)}" for i in items.tolist()]
        return maps.targets_map(flat, targets.tolist(), tips), by
    kinds = [shown.kind(i) for i in items.tolist()]
    places = []
    for kind in sorted(set(kinds)):
        own = [i for i, k in zip(items.tolist(), kinds, strict=True) if k == kind]
        places.append(maps.Place(kind, shown.name(kind), shown.thumbnails.address(_typical(shown, own), 48)))
    tips = [
        f"{format.short(shown.name(k), TIP)} · {format.short(findings.names[i], TIP)}"
        for i, k in zip(items.tolist(), kinds, strict=True)
    ]
    chips = "".join(
        f'<button type="button" data-c="{place.kind}" aria-pressed="false">'
        + (f'<img src="{place.address}" alt="">' if place.address else "")
        + f"{named(format.short(place.name, 40))}</button>"
        for place in places
    )
    legend = f'<div class="chips" role="group" aria-label="Show one class on the map">{chips}</div>'
    return f'<div class="mapbox">{maps.classes_map(flat, kinds, tips, places)}{legend}</div>', by


def _typical(shown: Shown, items: list[int]) -> int:
    """The item nearest the mean of its class."""
    x = torch.nn.functional.normalize(shown.findings.embeddings[items].double().cpu(), dim=1)
    return items[int((x @ x.mean(0)).argmax())]


def distances(shown: Shown) -> str:
    found = shown.choice.diagnosis
    if found is None:
        return ""
    edges = found["intra_histogram"]["edges"]
    groups = [
        Bars("different classes", "other", found["inter_histogram"]["counts"], found["inter_mean"]),
        Bars("same class", "main", found["intra_histogram"]["counts"], found["intra_mean"]),
    ]
    title = "Distances between items of the same class and of different classes"
    wide, narrow = (
        charts.histogram(edges, groups, title=title, x_label="distance of unit embeddings", width=width)
        for width in (2 * charts.WIDTH, charts.WIDTH)
    )
    facts = [
        ("alignment", found["alignment"], "mean squared distance of kin; lower is tighter"),
        ("uniformity", found["uniformity"], "lower is more evenly spread"),
        ("effective rank", found["effective_rank"], "dimensions in use"),
        ("hubness", found["hubness"], "skewness of how often an item is a neighbour"),
    ]
    rows = "".join(f"<div><dt>{n}</dt><dd>{number(v)} <small>{why}</small></dd></div>" for n, v, why in facts)
    return f'<figure class="wide">{wide}</figure><figure class="narrow">{narrow}</figure><dl class="facts">{rows}</dl>'


def worst(shown: Shown) -> str:
    rows = shown.choice.diagnosis["worst_classes"] if shown.choice.diagnosis else []
    lines = "".join(
        f'<li>{shown.pictures(row["class"], 4)}<span class="what">{format.caption(shown.name(row["class"]))}</span>'
        f"{charts.bar(row['r_precision'])}"
        f'<span class="much">{share(row["r_precision"])} <small>R@1 {share(row["recall@1"])} · '
        f"{format.count(row['items'], 'item', 'items')}</small></span></li>"
        for row in rows
    )
    return f'<ol class="bars">{lines}</ol>' if lines else ""


def confused(shown: Shown) -> str:
    rows = shown.choice.diagnosis["confused_pairs"] if shown.choice.diagnosis else []
    lines = []
    for row in rows:
        sides = [
            f'<span class="side">{shown.pictures(kind, 2)}'
            f'<span class="what">{format.caption(shown.name(kind))}</span></span>'
            for kind in row["classes"]
        ]
        pair = '<span class="arrow" aria-label="and">↔</span>'.join(sides)
        lines.append(
            f'<li><span class="pair">{pair}</span>{charts.bar(row["share"], "wrong")}'
            f'<span class="much">{share(row["share"])} '
            f"<small>{format.count(row['neighbours'], 'neighbour', 'neighbours')}</small></span></li>"
        )
    return f'<ol class="bars pairs">{"".join(lines)}</ol>' if lines else ""


def label_errors(shown: Shown) -> str:
    rows = shown.choice.diagnosis["label_errors"] if shown.choice.diagnosis else []
    cards = []
    for row in rows[:ERRORS]:
        item, own, other = row["item"], shown.name(row["class"]), shown.name(row["suggested"])
        cards.append(
            f"<li>{shown.picture(item, f'suspect item, labelled {own}')}"
            f'<div><p class="small soft">{named(shown.findings.names[item])}</p>'
            f"<p>labelled <b>{format.caption(own)}</b></p>"
            f"<p>{format.percent(round(row['agreement'], 2))} of its neighbours: <b>{format.caption(other)}</b></p>"
            f"{shown.pictures(row['suggested'], 3)}</div></li>"
        )
    if not cards:
        return ""
    more = f"{ERRORS} of {number(len(rows))} shown, the surest first."
    return f'<ul class="cards">{"".join(cards)}</ul>' + (
        f'<p class="small soft">{more}</p>' if len(rows) > ERRORS else ""
    )
