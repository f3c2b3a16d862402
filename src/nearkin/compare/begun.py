"""Whether a folder's study is this comparison: then its plan is kept and it goes on, else it is left alone."""

from typing import Any, NamedTuple

from nearkin.compare.plan import Plan
from nearkin.compare.study import Study
from nearkin.training.config.recipe import Recipe

__all__ = ["Begun", "asked_of", "keep", "plan_of"]


class Begun(NamedTuple):
    """What a comparison is of; with its plan the first thing that a study keeps."""

    asked: dict[str, Any]
    items: str


def asked_of(recipe: Recipe, losses: list[str]) -> dict[str, Any]:
    """Where things are may change between two commands, what they are may not."""
    asked = recipe.model_dump(exclude_unset=True, mode="json")
    for section, names in (("training", ("device", "workers")), ("data", ("source", "root"))):
        for name in names:
            asked.get(section, {}).pop(name, None)
    return {"recipe": {section: part for section, part in asked.items() if part}, "losses": losses}


def plan_of(study: Study, begun: Begun, given: dict[str, int | None]) -> Plan | None:
    """The plan of a study that was begun, where it is this comparison."""
    before, where = study.fact("begun"), study.path.parent
    if before is None:
        return None
    if before["asked"] != begun.asked:
        what = "other losses" if before["asked"]["recipe"] == begun.asked["recipe"] else "other settings"
        raise ValueError(f"{where}: its comparison was begun with {what}; choose another --out")
    if before["items"] != begun.items:
        raise ValueError(f"{where}: the items are not those with which its comparison was begun; choose another --out")
    plan = Plan(**before["plan"])
    for name, value in given.items():
        if value is not None and value != getattr(plan, name):
            raise ValueError(
                f"{where}: its comparison was begun with --{name} {getattr(plan, name)}, got {value}; "
                f"leave it out to go on, or choose another --out"
            )
    return plan


def keep(study: Study, begun: Begun, plan: Plan) -> None:
    """From here on the study is of this comparison, by this plan."""
    study.note("begun", begun._asdict() | {"plan": plan._asdict()})
