"""What `farthing.torch` says it exports is there."""

import inspect
import re

import pytest

import farthing as ft


@pytest.mark.parametrize("name", ft.torch.__all__)
def test_every_exported_name_is_found(name):
    assert getattr(ft.torch, name).__name__ == name


@pytest.mark.parametrize("name", ft.torch.__all__)
def test_every_exported_name_says_what_its_arguments_are(name):
    found = getattr(ft.torch, name)
    text = inspect.getdoc(found)
    arguments = [a for a in inspect.signature(found).parameters if a not in ("args", "kwargs")]
    if name in ("Training",):  # made by train
        arguments = ["model", "optimizer", "plan", "ledger"]
    assert not arguments or re.search(r"^(Parameters|Attributes)\n-+$", text, re.MULTILINE)
    section = re.split(r"^(?:Parameters|Attributes)\n-+$", text, maxsplit=1, flags=re.MULTILINE)[-1]
    assert [a for a in arguments if not re.search(rf"^[\w, ]*\b{a}\b", section, re.MULTILINE)] == []
