"""What the tests of rewards share."""

import pytest

from jaxrl_llm.rewards import SandboxError, check_sandbox


@pytest.fixture(scope="session")
def bubblewrap():
    """Skips where no sandbox can run at all."""
    try:
        return check_sandbox()
    except SandboxError as error:
        pytest.skip(str(error))
