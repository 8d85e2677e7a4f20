"""Settings: a profile, overrides that are checked, and the batch arithmetic."""

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.settings import Settings, choose

ROOT = Path(__file__).resolve().parents[1]
SMOKE: dict[str, Any] = {
    "hardware": "2 CPU processes",
    "gpus": 2,
    "micro_batch": 64,
    "accumulation": 2,
    "learning_rate": 1e-3,
    "clip": None,
    "compile": False,
}
H100 = SMOKE | {"hardware": "8xH100", "gpus": 8, "micro_batch": 4096, "accumulation": 1, "clip": 1.0}


def chosen(overrides: dict[str, Any] | None = None, profile: str = "smoke") -> Settings:
    return choose(profile, overrides, smoke=SMOKE, h100x8=H100)


def test_the_batch_identity_is_printed_and_multiplies_out(capsys):
    settings = chosen()
    assert capsys.readouterr().out == "micro 64 x accumulation 2 x world 2 = global 256\n"
    assert settings.global_batch == 256
    assert chosen(profile="h100x8").global_batch == 8 * 4096


def test_an_unknown_profile_is_refused_with_the_known_ones_and_the_nearest():
    with pytest.raises(ValueError, match=r"^profile='h100' is unknown.*: choose smoke or h100x8\.$") as error:
        chosen(profile="h100")
    assert "did you mean h100x8?" in str(error.value)
    with pytest.raises(ValueError, match=r"^profile='tpu' is unknown: choose smoke or h100x8\.$"):
        chosen(profile="tpu")


def test_overrides_replace_values_and_none_keeps_the_profiles():
    settings = chosen({"learning_rate": 0.5, "gpus": None, "micro_batch": 32})
    assert (settings.learning_rate, settings.gpus, settings["micro_batch"]) == (0.5, 2, 32)
    assert settings.global_batch == 32 * 2 * 2


def test_other_gpus_change_the_number_in_the_hardware_as_well():
    """Half of an 8xH100 node was refused by the planner: "8xH100 has 8 cards but gpus=4"."""
    assert chosen({"gpus": 4}, "h100x8").hardware == "4xH100"
    assert chosen({"gpus": 3}).hardware == "3 CPU processes"
    assert chosen(profile="h100x8").replace(gpus=1).hardware == "1xH100"
    assert chosen({"gpus": 4, "hardware": "4 old cards"}).hardware == "4 old cards"


def test_another_profile_can_be_planned_for_without_a_second_choice(capsys):
    settings = chosen({"gpus": 4}, "h100x8")
    capsys.readouterr()
    assert settings.of_profile("h100x8") is settings
    assert settings.of_profile("smoke").to_dict() == SMOKE
    with pytest.raises(ValueError, match="profile='h100' is unknown"):
        settings.of_profile("h100")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("value", [0.1, None])
def test_an_unknown_override_is_refused_with_the_nearest_name_even_when_it_is_none(value):
    with pytest.raises(ValueError, match=r"'learning_rte' is not a setting \(did you mean learning_rate\?\)"):
        chosen({"learning_rte": value})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("learning_rate", "1e-3", r"learning_rate='1e-3' is a str: give float, as the profiles do\."),
        ("learning_rate", True, r"learning_rate=True is a bool"),
        ("gpus", True, r"gpus=True is a bool: give a whole number"),
        ("micro_batch", 64.0, r"micro_batch=64.0 is a float: give a whole number"),
        ("compile", 1, r"compile=1 is an int: give bool"),
        ("hardware", 8, r"hardware=8 is an int: give str"),
        ("clip", "1", r"clip='1' is a str: give None or float"),
    ],
)
def test_an_override_of_the_wrong_type_is_refused_with_the_allowed_one(name, value, message):
    with pytest.raises(TypeError, match=message):
        chosen({name: value})


def test_an_int_becomes_a_float_where_the_profiles_hold_floats():
    assert type(chosen({"learning_rate": 1}).learning_rate) is float
    assert type(chosen({"clip": 2}).clip) is float  # Optional[float]: None in one profile, 1.0 in the other


@pytest.mark.parametrize("name", ["gpus", "micro_batch", "accumulation"])
@pytest.mark.parametrize("value", [0, -1])
def test_counts_below_one_are_refused_in_overrides_and_in_profiles(name, value):
    with pytest.raises(ValueError, match=f"^{name}={value} is too small: give a whole number of at least 1"):
        chosen({name: value})
    with pytest.raises(ValueError, match=f"^profile h100x8: {name}={value} is too small"):
        choose("smoke", smoke=SMOKE, h100x8=H100 | {name: value})


def test_profiles_with_different_keys_are_refused_naming_profile_and_keys():
    with pytest.raises(ValueError, match=r"^profile smoke lacks width, depth: every profile must hold the same"):
        choose("smoke", smoke=SMOKE, h100x8=H100 | {"width": 1, "depth": 2})
    with pytest.raises(ValueError, match=r"^profile smoke lacks accumulation"):
        choose("smoke", smoke={"hardware": "cpu", "gpus": 1, "micro_batch": 1})


def test_a_setting_cannot_take_a_name_that_settings_uses_itself():
    with pytest.raises(ValueError, match=r"^items: a setting cannot have this name"):
        choose("smoke", smoke=SMOKE | {"items": 3})


def test_settings_are_frozen_and_share_nothing_with_the_profile_dicts():
    profile = dict(SMOKE)
    settings = choose("smoke", smoke=profile)
    with pytest.raises(AttributeError):
        settings.learning_rate = 1.0
    profile["learning_rate"] = 7.0
    settings.to_dict()["learning_rate"] = 7.0
    assert settings.learning_rate == SMOKE["learning_rate"]


def test_a_misspelt_attribute_names_the_nearest_value():
    with pytest.raises(AttributeError, match=r"no value 'leaning_rate' \(did you mean learning_rate\?\)"):
        _ = chosen().leaning_rate


def test_settings_behave_as_a_mapping():
    settings = chosen()
    assert {**settings} == SMOKE == settings.to_dict() == dict(settings.items())
    assert "gpus" in settings
    assert "profile" not in settings


def test_replace_checks_as_overrides_are_checked_and_leaves_the_original():
    settings = chosen()
    changed = settings.replace(gpus=1, clip=None)
    assert (changed.gpus, changed.clip, settings.gpus) == (1, None, 2)
    with pytest.raises(ValueError, match="'gpu' is not a setting"):
        settings.replace(gpu=1)
    with pytest.raises(TypeError, match="compile=None is None: give bool"):
        settings.replace(compile=None)


def test_settings_reach_a_fresh_interpreter_that_has_only_the_helpers():
    settings = chosen({"micro_batch": 8})
    code = "import pickle, sys; s = pickle.load(sys.stdin.buffer); print(s.gpus, s.profile, s.global_batch)"
    out = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(settings), capture_output=True, cwd=ROOT, check=True
    )
    assert out.stdout.split() == [b"2", b"smoke", b"32"]
    assert copy.deepcopy(settings) == settings


def test_jupyter_shows_profiles_side_by_side_with_overrides_marked_and_escaped():
    html = choose("smoke", {"name": "<b>"}, smoke=SMOKE | {"name": "a"}, h100x8=H100 | {"name": "b"})._repr_html_()
    assert "<b>smoke</b>, chosen" in html
    assert "h100x8" in html
    assert "<b>&lt;b&gt;</b> (overrides a)" in html
    assert "8xH100" in html
    assert "global 256" in html
