"""A setting of a launch is declared once: the form, the command and the API know it, its words and its bounds."""

import json
from argparse import ArgumentParser
from dataclasses import Field, fields
from typing import Any

import pytest
from django import forms

from inspector.api.app import schema
from inspector.runs.launches.launch_form import NewRunForm
from rollouts.jobs.launch import LaunchSettings, setting_labels
from rollouts.management.commands.launch_rollouts import Command

BOUNDED = [one for one in fields(LaunchSettings) if "least" in one.metadata]


def test_the_form_the_command_and_the_api_have_every_setting() -> None:
    names = {one.name for one in fields(LaunchSettings)}
    assert names - NewRunForm.base_fields.keys() == {"engine"}  # the page runs a model as it is served
    parser = ArgumentParser()
    Command().add_arguments(parser)
    options = {action.dest: action for action in parser._actions}
    assert names <= options.keys() and all(options[name].help for name in names)
    described = json.loads(schema())["components"]["schemas"]["SettingsAsked"]["properties"]
    assert described.keys() == names and all(one["description"] for one in described.values())
    assert setting_labels()["group"] == NewRunForm.base_fields["group"].label == "Group size"
    assert options["group"].help == described["group"]["description"] == "Group size. Trajectories per prompt."


@pytest.mark.parametrize("setting", BOUNDED, ids=lambda setting: setting.name)
def test_form_and_launch_refuse_what_lies_outside_the_same_bounds(setting: Field[Any]) -> None:
    least, most = setting.metadata["least"], setting.metadata["most"]
    field = NewRunForm.base_fields[setting.name]
    for value, is_inside in ((least - 1, False), (least, not setting.metadata.get("is_above")), (most + 1, False)):
        problems = LaunchSettings(**{setting.name: value}).problems()
        assert (setting.name in problems) is not is_inside, (value, problems)
    assert field.clean(str(most)) == most
    for value in (least - 1, most + 1):
        with pytest.raises(forms.ValidationError):
            field.clean(str(value))


def test_no_number_is_no_temperature() -> None:
    assert "from 0" in LaunchSettings(temperature=float("nan")).problems()["temperature"]


def test_the_settings_of_a_run_are_read_without_what_is_no_setting() -> None:
    assert LaunchSettings.of({"group": 2, "tool_calls": "x"}) == LaunchSettings(group=2)
