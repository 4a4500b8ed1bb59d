"""Documents."""

from __future__ import annotations

import pytest

from spotrun.wire import StateRef


def test_replace_changes_fields_that_exist_and_refuses_others() -> None:
    assert StateRef(generation=1, step=2).replace(step=3) == StateRef(generation=1, step=3)
    with pytest.raises(TypeError, match="StateRef has no field stpe"):
        StateRef(generation=1, step=2).replace(stpe=3)
