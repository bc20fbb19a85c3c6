"""The message of a refusal, as a user sees it."""

from collections.abc import Callable

import pytest

from nemo_fp8rl.common.errors import UserError


def refusal_of(call: Callable[..., object], *arguments: object) -> str:
    """Return the message of the UserError that the call raises; the message must be one line."""
    with pytest.raises(UserError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)
