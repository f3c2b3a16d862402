"""The report of a run as one HTML file that opens offline, and one picture of its retrieval grid."""

from nearkin.report.comparison_page import write_comparison
from nearkin.report.findings import Findings
from nearkin.report.heatmaps import write_heat_maps
from nearkin.report.run_report import findings_of, of_run, rehearse, write
from nearkin.report.thumbnails import write_picture

__all__ = ["Findings", "findings_of", "of_run", "rehearse", "write", "write_comparison", "write_heat_maps"]
__all__ += ["write_picture"]


def __dir__() -> list[str]:
    return __all__
