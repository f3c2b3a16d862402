"""Counters: the text that Prometheus reads, sums over processes, and processes that share them."""

import subprocess
import sys
import tempfile

import pytest

from nearkin.web.metrics import BUCKETS, ROUTES, Metrics, nbytes

PATHS = [
    "/api/search",
    "/api/items/{id}",
    "/api/items/{id}/thumbnail",
    "/page/script.js",
    "/page/style.css",
    "/metrics",
]


def read(metrics, rows=None):
    lines = metrics.text(rows).splitlines()
    assert [line for line in lines if not line] == []
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}


def named(*arguments):
    metrics = Metrics(*arguments)
    metrics.name_routes(PATHS)
    return metrics


def test_requests_are_counted_by_address_and_status():
    metrics = named()
    for path in (
        "/api/items/7",
        "/api/items/8",
        "/api/items/7/thumbnail",
        "/page/style.css",
        "/page/x",
        "/../etc",
        "/",
    ):
        metrics.observe(path, 200, 0.001)
    metrics.observe("/api/search", 418, 0.001)
    numbers = read(metrics)
    assert {key: value for key, value in numbers.items() if "requests_total" in key} == {
        'nearkin_requests_total{route="/api/items/{id}",status="200"}': 2,
        'nearkin_requests_total{route="/api/items/{id}/thumbnail",status="200"}': 1,
        'nearkin_requests_total{route="/page/{file}",status="200"}': 2,
        'nearkin_requests_total{route="other",status="200"}': 2,
        'nearkin_requests_total{route="/api/search",status="other"}': 1,
    }


def test_the_histogram_is_cumulative_and_a_bound_belongs_to_its_bucket():
    metrics, times = named(), [0.001, 0.005, 0.0051, 0.2, 30.0, 31.0]
    for seconds in times:
        metrics.observe("/api/search", 200, seconds)
    metrics.observe("/api/search", 503, 0.001)
    numbers = read(metrics)
    for bound in BUCKETS:
        key = f'nearkin_request_seconds_bucket{{route="/api/search",le="{bound:g}"}}'
        assert numbers[key] == sum(seconds <= bound for seconds in times), bound
    assert numbers['nearkin_request_seconds_bucket{route="/api/search",le="+Inf"}'] == len(times)
    assert numbers['nearkin_request_seconds_count{route="/api/search"}'] == len(times)
    assert numbers['nearkin_request_seconds_sum{route="/api/search"}'] == pytest.approx(sum(times))
    assert numbers["nearkin_rejected_total"] == 1


def test_counters_of_ended_processes_stay_and_what_was_under_way_does_not():
    with tempfile.TemporaryFile() as file:
        file.truncate(nbytes(3))
        supervisor = named(3, 0, file.fileno())
        first, second = named(3, 1, file.fileno()), named(3, 2, file.fileno())
        first.observe("/api/search", 200, 0.1)
        second.observe("/api/search", 200, 0.1)
        second.count_enrolled(5)
        first.gauge(3, {"encoder": 7})
        second.gauge(2, {"encoder": 4, "reader": 1})
        numbers = read(supervisor, 11)
        assert numbers['nearkin_requests_total{route="/api/search",status="200"}'] == 2
        assert numbers["nearkin_requests_active"] == 5 and numbers['nearkin_queue_length{queue="encoder"}'] == 11
        assert numbers["nearkin_gallery_rows"] == 11 and numbers["nearkin_processes"] == 3
        supervisor.forget(2)
        numbers = read(first)
        assert numbers["nearkin_requests_active"] == 3 and numbers['nearkin_queue_length{queue="encoder"}'] == 7
        assert numbers["nearkin_enrolled_rows_total"] == 5 and numbers["nearkin_processes"] == 2
        again = named(3, 2, file.fileno())  # a new worker in its place
        again.count_enrolled(1)
        assert read(first)["nearkin_enrolled_rows_total"] == 6 and "nearkin_gallery_rows" not in read(first)


@pytest.mark.skipif(sys.platform == "win32", reason="processes share a file by its descriptor")
def test_another_process_adds_to_the_same_numbers():
    with tempfile.TemporaryFile() as file:
        file.truncate(nbytes(2))
        metrics = named(2, 0, file.fileno())
        code = f"from nearkin.web.metrics import Metrics; Metrics(2, 1, {file.fileno()}).count_enrolled(3)"
        subprocess.run([sys.executable, "-c", code], pass_fds=[file.fileno()], check=True)
        metrics.count_enrolled(1)
        assert read(metrics)["nearkin_enrolled_rows_total"] == 4


def test_more_addresses_than_there_is_space_for_are_refused():
    with pytest.raises(ValueError, match="at most 63 addresses"):
        Metrics().name_routes([f"/{n}" for n in range(ROUTES)])
