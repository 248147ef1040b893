"""Results as JSON and back, by the annotations of their classes."""

from __future__ import annotations

import json

import pytest

from microtome.errors import BadFile
from microtome.results.base import Result, parse
from microtome.results.profile import Profile
from tests.report.test_foreign_text import RESULTS


@pytest.fixture(scope="module", params=list(RESULTS))
def result(request: pytest.FixtureRequest) -> Result:
    return RESULTS[request.param]()


def test_a_result_is_read_as_it_was_written(result: Result) -> None:
    again = parse(result.to_json(), "it")
    assert type(again) is type(result)
    assert again.to_json() == result.to_json()
    assert str(again) == str(result)


def test_a_subclass_has_the_kind_of_its_base() -> None:
    class Mine(Profile):
        pass

    assert (Mine.kind, Mine.schema) == (Profile.kind, Profile.schema)


def test_fields_that_a_class_does_not_have_are_ignored(result: Result) -> None:
    data = json.loads(result.to_json()) | {"from_the_future": 1}
    assert parse(json.dumps(data), "it").to_json() == result.to_json()


def test_a_field_that_is_missing_is_named(result: Result) -> None:
    data = json.loads(result.to_json())
    del data[next(name for name in ("model", "before", "models") if name in data)]
    with pytest.raises(BadFile, match=r"the \w+ in it is corrupt: ValueError: expected the field '\w+' of \w+"):
        parse(json.dumps(data), "it")


def test_a_number_that_is_missing_is_not_taken_for_0() -> None:
    data = json.loads(RESULTS["profile"]().to_json())
    del data["calls"][0]["own"]["params"]
    with pytest.raises(BadFile, match="expected the field 'params' of Amounts"):
        parse(json.dumps(data), "it")


def test_a_metric_that_an_older_file_lacks_is_unknown() -> None:
    data = json.loads(RESULTS["profile"]().to_json())
    for row in data["calls"]:
        del row["energy_j"], row["own"]["energy_j"]
    assert parse(json.dumps(data), "it").total.energy_j is None


def test_parts_that_do_not_belong_together_are_refused() -> None:
    data = json.loads(RESULTS["plan"]().to_json()) | {"chosen": 99}
    with pytest.raises(BadFile, match="its winner is candidate 99 of"):
        parse(json.dumps(data), "it")
