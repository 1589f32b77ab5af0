"""What `farthing.torch` says it exports is there."""

import pytest

import farthing as ft


@pytest.mark.parametrize("name", ft.torch.__all__)
def test_every_exported_name_is_found(name):
    assert getattr(ft.torch, name).__name__ == name
