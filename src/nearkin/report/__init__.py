"""The report of a run as one HTML file that opens offline, and one picture of its retrieval grid."""

from nearkin.report.comparison_page import write_comparison
from nearkin.report.contact_sheet import write_contact_sheet
from nearkin.report.findings import Findings
from nearkin.report.heatmaps import write_heat_maps
from nearkin.report.open_set_page import write_open_set
from nearkin.report.run_report import findings_of, of_run, rehearse, write
from nearkin.report.thumbnails import write_picture

__all__ = ["Findings", "findings_of", "of_run", "rehearse", "write", "write_comparison"]
__all__ += ["write_contact_sheet", "write_heat_maps", "write_open_set", "write_picture"]


def __dir__() -> list[str]:
    return __all__
