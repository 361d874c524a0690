"""``--hisparse-config``: every field, its limits, and what is said about a bad one."""

from __future__ import annotations

import json

import pytest

from hisparse_sgl.integrations.sglang.options import Options


def parse(**fields: object) -> Options:
    return Options.parse(json.dumps(fields))


@pytest.mark.parametrize("text", [None, "", "{}"])
def test_nothing_given_means_the_defaults(text: str | None) -> None:
    options = Options.parse(text)
    assert (options.top_k, options.hot_rows(2048), options.host_to_device_ratio) == (2048, 4096, 2)
    assert options.eager_host_mirror is False
    assert options.max_hot_requests is None


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("top_k", [1, 512, 16384], [0, -1, 2.5, "2048", True, None]),
        ("device_buffer_size", [None, 2048, 32768], [0, 2047, 2050, 32832, "4096"]),
        ("host_to_device_ratio", [1, 10], [0, 1.5, "2"]),
        ("swap_in_block_size", [1, 1024], [0, 1025, 96.0]),
        ("eager_host_mirror", [True, False], [1, "true", None]),
        ("max_spill_pages", [None, 1, 4096], [0, -3, "8"]),
        ("admission_window", [None, 1, 100_000], [0, 0.5]),
        ("audit_every", [0, 7], [-1, None]),
        ("kernels", ["auto", "triton", "reference", "interpreter"], ["cuda", 1, None]),
        ("poison", [True, False], ["yes", 0]),
        ("max_hot_requests", [None, 1, 64], [0, "all"]),
        ("resident_graphs", [True, False], [1, "no"]),
    ],
)
def test_each_field_is_taken_and_checked(field: str, good: list[object], bad: list[object]) -> None:
    for value in good:
        assert getattr(parse(**{field: value}), field) == value
    for value in bad:
        with pytest.raises(ValueError, match=field) as caught:
            parse(**{field: value})
        assert repr(value) in str(caught.value)
        assert "the limit" in str(caught.value)


def test_every_field_has_a_case_above_and_a_description() -> None:
    (marker,) = test_each_field_is_taken_and_checked.pytestmark  # type: ignore[attr-defined]
    assert {case[0] for case in marker.args[1]} == set(Options.model_fields)
    assert all(field.description for field in Options.model_fields.values())


@pytest.mark.parametrize(
    ("name", "near"),
    [("topk", "top_k"), ("device_bufer_size", "device_buffer_size"), ("kernel", "kernels")],
)
def test_an_unknown_field_is_refused_with_the_nearest_name(name: str, near: str) -> None:
    with pytest.raises(ValueError, match=rf"'{name}'.*did you mean '{near}'"):
        parse(**{name: 1})


@pytest.mark.parametrize("text", ["{", "[1]", "3", '"top_k"'])
def test_what_is_no_object_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"JSON object.*host_to_device_ratio"):
        Options.parse(text)


def test_hot_region_must_hold_what_a_step_selects() -> None:
    with pytest.raises(ValueError, match=r"device_buffer_size .* is 1024, .*top_k = 2048.*at least 2048"):
        parse(device_buffer_size=1024)
    with pytest.raises(ValueError, match=r"top_k .* is 20000, .*32768"):
        parse(top_k=20000)
    assert parse(top_k=100).hot_rows(100) == 256


def test_hot_region_must_hold_what_the_model_selects() -> None:
    parse(device_buffer_size=2048, top_k=512).check_model(2048)
    with pytest.raises(ValueError, match=r"device_buffer_size .* is 512, .*index_topk of the model = 2048"):
        parse(device_buffer_size=512, top_k=512).check_model(2048)


def test_options_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Options.parse(None).top_k = 3  # type: ignore[misc]
