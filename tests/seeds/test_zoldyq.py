"""What ZoldyQ promises over HTTP, one test each, over real sockets.

Where the design decides otherwise it is said in the test: names of settings and metrics are ours,
and `/metrics` has totals, with each queue on `/metrics/detailed`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from broker_process import PATIENCE_SECONDS, BrokerProcess, wait_until
from millstream.config import load_settings
from millstream.kinds import Address
from millstream.observe.histogram import SAMPLE_EVERY
from seeds.shared import Client, fresh_name

EMAIL = {"email": "user@example.com", "subject": "Welcome", "body": "Thanks for signing up!"}


@pytest.fixture(scope="module")
def zoldyq(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with BrokerProcess(str(tmp_path_factory.mktemp("zoldyq"))) as broker:
        client = Client(broker.wait_until_ready())
        yield client
        client.close()


# ---- enqueue


def test_enqueue_answers_200_with_its_four_fields(zoldyq: Client) -> None:
    name = fresh_name()
    before_us = time.time_ns() // 1000
    answer = zoldyq.enqueue(name, EMAIL)
    after_us = time.time_ns() // 1000
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    page = answer.json()
    assert before_us <= page.pop("enqueued_at") <= after_us
    assert page == {"queued": True, "queue_name": name, "queue_size": 1}


def test_enqueue_makes_the_queue(zoldyq: Client) -> None:
    name = fresh_name()
    assert zoldyq.get(f"/queues/{name}").status_code == 404
    zoldyq.enqueue(name, 1)
    assert zoldyq.json(f"/queues/{name}")["size"] == 1


def test_queue_size_grows(zoldyq: Client) -> None:
    name = fresh_name()
    assert [zoldyq.enqueue(name, n).json()["queue_size"] for n in range(3)] == [1, 2, 3]


@pytest.mark.parametrize("payload", [EMAIL, [1, 2], "text", 7, 1.5, True, None, {}, "ä€😀"])
def test_a_payload_is_any_json(zoldyq: Client, payload: object) -> None:
    name = fresh_name()
    zoldyq.enqueue(name, payload)
    assert zoldyq.json(f"/queues/{name}/dequeue")["payload"] == payload


def test_a_full_queue_is_429_with_its_four_fields(zoldyq: Client) -> None:
    name = fresh_name()
    zoldyq.put(f"/queues/{name}", {"capacity": 1})
    zoldyq.enqueue(name, 1)
    answer = zoldyq.enqueue(name, 2)
    assert answer.status_code == 429
    page = answer.json()
    assert page["error"] == "queue_full"
    assert page["message"] == f"Queue '{name}' is at capacity"
    assert (page["queue_name"], page["queue_capacity"]) == (name, 1)


def test_a_body_without_a_payload_is_400(zoldyq: Client) -> None:
    for body in (b"", b"{}", b"[]", b"not json", b'{"payload":'):
        answer = zoldyq.post(f"/queues/{fresh_name()}/enqueue", body)
        assert (answer.status_code, answer.json()["error"]) == (400, "body_invalid")


# ---- dequeue


def test_dequeue_answers_200_with_its_four_fields(zoldyq: Client) -> None:
    name = fresh_name()
    at_us = zoldyq.enqueue(name, EMAIL).json()["enqueued_at"]
    zoldyq.enqueue(name, 2)
    answer = zoldyq.get(f"/queues/{name}/dequeue")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {
        "payload": EMAIL,
        "queue_name": name,
        "enqueued_at": at_us,
        "queue_size": 1,
    }


def test_an_empty_queue_is_204_at_once(zoldyq: Client) -> None:
    name = fresh_name()
    zoldyq.put(f"/queues/{name}", {})
    begin = time.monotonic()
    answer = zoldyq.get(f"/queues/{name}/dequeue")
    assert (answer.status_code, answer.content) == (204, b"")
    assert time.monotonic() - begin < 5


def test_an_unknown_queue_is_404(zoldyq: Client) -> None:
    name = fresh_name()
    answer = zoldyq.get(f"/queues/{name}/dequeue")
    assert answer.status_code == 404
    page = answer.json()
    assert page["error"] == "queue_not_found"
    assert page["message"] == f"Queue '{name}' does not exist"


def test_dequeue_waits_for_a_message(zoldyq: Client) -> None:
    name = fresh_name()
    zoldyq.put(f"/queues/{name}", {})
    url = zoldyq.broker.url(f"/queues/{name}/dequeue?timeout=30")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: httpx.get(url, timeout=60))
        wait_until(lambda: zoldyq.json(f"/queues/{name}")["waiting"] == 1, "a waiter")
        zoldyq.enqueue(name, "here")
        assert waiting.result().json()["payload"] == "here"


def test_dequeue_that_waits_in_vain_is_204(zoldyq: Client) -> None:
    name = fresh_name()
    zoldyq.put(f"/queues/{name}", {})
    assert zoldyq.get(f"/queues/{name}/dequeue?timeout=0.3").status_code == 204
    assert zoldyq.json(f"/queues/{name}")["timeout_total"] == 1


@pytest.mark.parametrize(("timeout", "status"), [("0", 200), ("5", 200), ("30", 200)])
def test_a_timeout_of_up_to_30_seconds_is_taken(zoldyq: Client, timeout: str, status: int) -> None:
    name = fresh_name()
    zoldyq.enqueue(name, 1)
    assert zoldyq.get(f"/queues/{name}/dequeue?timeout={timeout}").status_code == status


@pytest.mark.parametrize("timeout", ["30.1", "31", "-1", "soon", "nan", "inf", ""])
def test_any_other_timeout_is_400(zoldyq: Client, timeout: str) -> None:
    name = fresh_name()
    zoldyq.enqueue(name, 1)
    answer = zoldyq.get(f"/queues/{name}/dequeue?timeout={timeout}")
    assert answer.status_code == 400
    assert (answer.json()["parameter"], answer.json()["most"]) == ("timeout", 30)
    assert zoldyq.json(f"/queues/{name}")["size"] == 1


def test_named_queues_are_apart(zoldyq: Client) -> None:
    emails, webhooks = fresh_name("emails"), fresh_name("webhooks")
    zoldyq.enqueue(emails, "e")
    zoldyq.enqueue(webhooks, "w")
    assert zoldyq.json(f"/queues/{emails}/dequeue")["payload"] == "e"
    assert zoldyq.json(f"/queues/{webhooks}/dequeue")["payload"] == "w"


def test_first_in_is_first_out(zoldyq: Client) -> None:
    name = fresh_name()
    for number in range(50):
        zoldyq.enqueue(name, number)
    taken = [zoldyq.json(f"/queues/{name}/dequeue")["payload"] for _ in range(50)]
    assert taken == list(range(50))


def test_ten_producers_at_once_lose_nothing(zoldyq: Client) -> None:
    name = fresh_name()
    url = zoldyq.broker.url(f"/queues/{name}/enqueue")

    def produce(worker: int) -> None:
        with httpx.Client(timeout=PATIENCE_SECONDS) as client:
            for number in range(30):
                page = {"payload": worker * 100 + number}
                assert client.post(url, json=page).status_code == 200

    with ThreadPoolExecutor(10) as pool:
        list(pool.map(produce, range(10)))
    page = zoldyq.json(f"/queues/{name}/dequeue?max=1000")
    expected = [worker * 100 + number for worker in range(10) for number in range(30)]
    assert sorted(one["payload"] for one in page["messages"]) == expected


# ---- GET /health


def test_health_has_status_uptime_and_the_number_of_queues(zoldyq: Client) -> None:
    zoldyq.enqueue(fresh_name(), 1)
    page = zoldyq.json("/health")
    assert page["status"] == "healthy"
    assert page["uptime_seconds"] > 0
    assert page["total_queues"] == len(zoldyq.json("/queues")["queues"])


def test_health_has_six_fields_for_a_queue(tmp_path: Path) -> None:
    with BrokerProcess(str(tmp_path)) as broker:
        client = Client(broker.wait_until_ready())
        client.put("/queues/emails", {"capacity": 8})
        for number in range(9):
            client.enqueue("emails", number)
        client.get("/queues/emails/dequeue")
        assert client.json("/health")["queues"]["emails"] == {
            "size": 7,
            "capacity": 8,
            "utilization": 0.875,
            "enqueued_total": 8,
            "dequeued_total": 1,
            "queue_full_count": 1,
        }
        client.close()


def test_health_stays_small_with_many_queues(tmp_path: Path) -> None:
    with BrokerProcess(str(tmp_path)) as broker:
        client = Client(broker.wait_until_ready())
        for _ in range(105):
            client.put(f"/queues/{fresh_name()}", {})
        page = client.json("/health")
        assert page["total_queues"] == 106
        assert page["queues_listed"] == len(page["queues"]) == 100
        client.close()


# ---- GET /metrics


def test_metrics_are_prometheus_text(zoldyq: Client) -> None:
    answer = zoldyq.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    assert "# HELP millstream_queue_size " in answer.text
    assert "# TYPE millstream_queue_size gauge" in answer.text


def test_metrics_have_queue_size(zoldyq: Client) -> None:
    before = zoldyq.metric("millstream_queue_size")
    zoldyq.enqueue(fresh_name(), 1)
    assert zoldyq.metric("millstream_queue_size") == before + 1


def test_metrics_have_queue_capacity(zoldyq: Client) -> None:
    before = zoldyq.metric("millstream_queue_capacity")
    zoldyq.put(f"/queues/{fresh_name()}", {"capacity": 77})
    assert zoldyq.metric("millstream_queue_capacity") == before + 77


def test_metrics_have_enqueued_total_and_dequeued_total(zoldyq: Client) -> None:
    name = fresh_name()
    samples = ("millstream_enqueued_total", "millstream_dequeued_total")
    before = [zoldyq.metric(sample) for sample in samples]
    zoldyq.enqueue(name, 1)
    zoldyq.enqueue(name, 2)
    zoldyq.get(f"/queues/{name}/dequeue")
    assert [zoldyq.metric(sample) for sample in samples] == [before[0] + 2, before[1] + 1]


def test_metrics_have_queue_full_total(zoldyq: Client) -> None:
    name = fresh_name()
    before = zoldyq.metric("millstream_queue_full_total")
    zoldyq.put(f"/queues/{name}", {"capacity": 1})
    for number in range(3):
        zoldyq.enqueue(name, number)
    assert zoldyq.metric("millstream_queue_full_total") == before + 2


def test_metrics_have_dequeue_timeout_total(zoldyq: Client) -> None:
    name = fresh_name()
    before = zoldyq.metric("millstream_dequeue_timeout_total")
    zoldyq.put(f"/queues/{name}", {})
    zoldyq.get(f"/queues/{name}/dequeue?timeout=0.02")
    assert zoldyq.metric("millstream_dequeue_timeout_total") == before + 1


@pytest.mark.parametrize("verb", ["enqueue", "dequeue"])
def test_metrics_have_a_histogram_of_durations(zoldyq: Client, verb: str) -> None:
    """One request in sixteen is measured, and counts for all."""
    name, family = fresh_name(), f"millstream_{verb}_duration_seconds"
    before = zoldyq.metric(f"{family}_count")
    for number in range(SAMPLE_EVERY):
        zoldyq.enqueue(name, number)
        zoldyq.get(f"/queues/{name}/dequeue")
    assert zoldyq.metric(f"{family}_count") == before + SAMPLE_EVERY
    assert zoldyq.metric(f"{family}_sum") > 0
    assert f"# TYPE {family} histogram" in zoldyq.get("/metrics").text
    bounds = ("0.0001", "0.0005", "0.001", "0.005", "0.01", "0.05", "0.1", "0.5", "1.0", "+Inf")
    counts = [zoldyq.metric(f'{family}_bucket{{le="{bound}"}}') for bound in bounds]
    assert counts == sorted(counts)
    assert counts[-1] == before + SAMPLE_EVERY


def test_each_queue_is_on_a_page_of_its_own(zoldyq: Client) -> None:
    name = fresh_name()
    zoldyq.put(f"/queues/{name}", {"capacity": 2, "max_bytes": 100})
    for number in range(3):
        zoldyq.enqueue(name, number)
    zoldyq.get(f"/queues/{name}/dequeue")
    zoldyq.get(f"/queues/{name}/dequeue")
    zoldyq.get(f"/queues/{name}/dequeue?timeout=0.02")
    zoldyq.enqueue(name, "four")
    expected = {
        "queue_size": 1,
        "queue_capacity": 2,
        "queue_bytes": 6,
        "queue_bytes_max": 100,
        "queue_waiting": 0,
        "enqueued_total": 3,
        "dequeued_total": 2,
        "queue_full_total": 1,
        "dequeue_timeout_total": 1,
    }
    found = {
        metric: zoldyq.metric(f'millstream_{metric}{{queue="{name}"}}', "/metrics/detailed")
        for metric in expected
    }
    assert found == expected
    assert name not in zoldyq.get("/metrics").text


# ---- batches and management, which ZoldyQ lists as nice to have


def test_a_batch_is_enqueued_and_dequeued_in_order(zoldyq: Client) -> None:
    name = fresh_name()
    answer = zoldyq.post(f"/queues/{name}/enqueue/batch", b'{"payloads": [1, "2", {"three": 3}]}')
    assert (answer.status_code, answer.json()["queued"]) == (200, 3)
    page = zoldyq.json(f"/queues/{name}/dequeue?max=10")
    assert [one["payload"] for one in page["messages"]] == [1, "2", {"three": 3}]


def test_a_batch_that_does_not_fit_is_refused_whole(zoldyq: Client) -> None:
    name = fresh_name()
    zoldyq.put(f"/queues/{name}", {"capacity": 2})
    answer = zoldyq.post(f"/queues/{name}/enqueue/batch", b'{"payloads": [1, 2, 3]}')
    assert answer.status_code == 429
    assert zoldyq.json(f"/queues/{name}")["size"] == 0


def test_a_queue_can_be_deleted(zoldyq: Client) -> None:
    name = fresh_name()
    zoldyq.enqueue(name, 1)
    assert zoldyq.delete(f"/queues/{name}").status_code == 204
    assert zoldyq.get(f"/queues/{name}/dequeue").status_code == 404


def test_a_queue_has_a_capacity_of_its_own(zoldyq: Client) -> None:
    name = fresh_name()
    zoldyq.put(f"/queues/{name}", {"capacity": 3})
    assert zoldyq.json(f"/queues/{name}")["capacity"] == 3


def test_the_api_is_described_by_openapi(zoldyq: Client) -> None:
    paths = zoldyq.json("/openapi.json")["paths"]
    for path in ("/queues/{name}/enqueue", "/queues/{name}/dequeue", "/health", "/metrics"):
        assert path in paths


def test_a_client_that_names_no_queue_works_as_it_is(zoldyq: Client) -> None:
    """The examples there call `/enqueue` and `/dequeue?timeout=5`. Here these carry bytes, and the
    bytes are the JSON that was sent."""
    sent = zoldyq.post("/enqueue", json.dumps({"payload": EMAIL}).encode())
    assert sent.status_code == 202
    assert zoldyq.get("/dequeue?timeout=5").json()["payload"] == EMAIL


def test_a_queue_can_be_listed_shown_and_cleared(zoldyq: Client) -> None:
    name = fresh_name()
    zoldyq.enqueue(name, "four")
    assert name in [queue["name"] for queue in zoldyq.json("/queues")["queues"]]
    page = zoldyq.json(f"/queues/{name}")
    assert (page["size"], page["bytes"], page["waiting"]) == (1, 6, 0)
    cleared = zoldyq.post(f"/queues/{name}/clear").json()
    assert cleared == {"queue_name": name, "messages": 1, "bytes": 6}
    assert zoldyq.json(f"/queues/{name}")["size"] == 0


def test_totals_stay_when_a_queue_is_deleted(zoldyq: Client) -> None:
    name = fresh_name()
    zoldyq.enqueue(name, 1)
    before = zoldyq.metric("millstream_enqueued_total")
    zoldyq.delete(f"/queues/{name}")
    assert zoldyq.metric("millstream_enqueued_total") == before


def test_the_api_has_a_page_for_people(zoldyq: Client) -> None:
    assert zoldyq.get("/docs").headers["content-type"].startswith("text/html")


@pytest.mark.parametrize("name", ["a b", "a!b", "ä", "x" * 256, "a%2Fb"])
def test_a_name_of_any_other_form_is_400(zoldyq: Client, name: str) -> None:
    for answer in (
        zoldyq.enqueue(name, 1),
        zoldyq.get(f"/queues/{name}/dequeue"),
        zoldyq.put(f"/queues/{name}", {}),
    ):
        assert (answer.status_code, answer.json()["error"]) == (400, "queue_name_invalid")


# ---- settings


@pytest.mark.parametrize(
    ("variable", "text", "attribute", "value"),
    [
        ("MILLSTREAM_HTTP", "0.0.0.0:9000", "http", Address("0.0.0.0", 9000)),
        ("MILLSTREAM_QUEUE_CAPACITY", "100000", "queue_capacity", 100_000),
        ("MILLSTREAM_QUEUES_MAX", "100", "queues_max", 100),
        ("MILLSTREAM_LOG_LEVEL", "info", "log_level", "info"),
        ("MILLSTREAM_LOG_FORMAT", "json", "log_format", "json"),
        ("MILLSTREAM_REQUEST_LOG", "on", "request_log", "on"),
    ],
)
def test_settings_can_come_from_the_environment(
    variable: str, text: str, attribute: str, value: object
) -> None:
    settings = load_settings(flags={}, environment={variable: text})
    assert getattr(settings, attribute) == value


def test_requests_can_be_logged(tmp_path: Path) -> None:
    with BrokerProcess(str(tmp_path), "--request-log", "on") as broker:
        client = Client(broker.wait_until_ready())
        client.enqueue("emails", 1)
        client.close()
        message = broker.wait_for("request")
        assert (message["method"], message["path"]) == ("POST", "/queues/emails/enqueue")
        assert message["status"] == 200


def test_host_and_port_are_http() -> None:
    settings = load_settings(flags={"http": "0.0.0.0:9000"}, environment={})
    assert str(settings.http) == "0.0.0.0:9000"


def test_default_queue_capacity_is_queue_capacity_100000_by_default() -> None:
    environment = {"MILLSTREAM_QUEUE_CAPACITY": "7"}
    assert load_settings(flags={}, environment={}).queue_capacity == 100_000
    assert load_settings(flags={}, environment=environment).queue_capacity == 7


def test_max_queues_is_queues_max(tmp_path: Path) -> None:
    """100 by default there; 1,000 by the design."""
    assert load_settings(flags={}, environment={}).queues_max == 1_000
    with BrokerProcess(str(tmp_path), "--queues-max", "2") as broker:
        client = Client(broker.wait_until_ready())
        # One of them is the queue `default`.
        assert client.enqueue("a", 1).status_code == 200
        answer = client.enqueue("b", 1)
        assert (answer.status_code, answer.json()["error"]) == (429, "too_many_queues")
        client.close()


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_log_level_is_log_level(level: str) -> None:
    assert load_settings(flags={"log_level": level}, environment={}).log_level == level


@pytest.mark.parametrize("form", ["json", "pretty"])
def test_log_format_is_log_format(form: str) -> None:
    assert load_settings(flags={"log_format": form}, environment={}).log_format == form


def test_settings_can_come_from_toml(tmp_path: Path) -> None:
    file = tmp_path / "mill.toml"
    file.write_text('http = "0.0.0.0:9000"\nqueue_capacity = 5\nlog_level = "debug"\n')
    settings = load_settings(flags={}, environment={}, file=str(file))
    assert (str(settings.http), settings.queue_capacity) == ("0.0.0.0:9000", 5)


def test_its_own_messages_are_structured(zoldyq: Client) -> None:
    assert all({"time", "level", "event"} <= set(one) for one in zoldyq.broker.messages())
