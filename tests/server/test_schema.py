"""schemathesis over the OpenAPI document: whatever fits it, and whatever does not, is answered as it says."""

import pytest
from hypothesis import HealthCheck, Phase, given, settings

pytest.importorskip("schemathesis")

import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from pagefold.server.limits import OPEN_PATHS
from tests.server.live import live
from tests.server.test_serving_cases import ROUTES

OPERATIONS = [
    *((method, path.replace("tiny", "{name}")) for method, path in ROUTES if path != "/openapi.json"),
    *(("GET", path) for path in OPEN_PATHS),
]
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    """Answers are short, however many tokens a body asks for."""
    options = {"max_model_len": 24, "max_num_seqs": 64, "num_pages": 1000, "disable_log_requests": True}
    with live(tmp_path_factory.mktemp("schema"), **options) as server:
        yield schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        assert server.http.get("/health").status_code == 200
        stats = server.stats()
        assert stats["running"] == stats["waiting"] == stats["kv"][0]["used"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_the_server_does_as_its_document_says(api, method, path):
    answers_as_described(api[path][method].as_strategy())


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for method, path in OPERATIONS if method == "POST" and "reset" not in path])
def test_bodies_that_break_the_document_break_nothing_else(api, path):
    answers_as_described(api[path]["POST"].as_strategy(generation_mode=GenerationMode.NEGATIVE))


def answers_as_described(cases):
    @given(case=cases)
    @settings(max_examples=25, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    def check(case):
        case.call_and_validate(checks=CHECKS)

    check()


@pytest.mark.slow
def test_no_operation_is_left_out(api):
    operations = [found.ok() for found in api.get_all_operations()]
    assert {(operation.method.upper(), operation.path) for operation in operations} == set(OPERATIONS)
