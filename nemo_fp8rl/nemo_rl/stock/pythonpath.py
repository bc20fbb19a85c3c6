"""How NeMo RL's workers find this package, in environments of their own in which it is not installed."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import nemo_fp8rl

PACKAGE = Path(nemo_fp8rl.__file__).parent


@contextmanager
def package_on_pythonpath() -> Iterator[None]:
    """PYTHONPATH ends with a folder that holds the package: NeMo RL hands it to Ray and to every actor that it starts.

    That is a checkout's root. An installed package lies among others, which would stand before those of the workers'
    own environments: then it is a temporary folder with a link to the package alone, on this node.
    """
    with ExitStack() as stack:
        folder = PACKAGE.parent
        if not (folder / "pyproject.toml").is_file():
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="nemo_fp8rl_")))
            (folder / PACKAGE.name).symlink_to(PACKAGE)
        before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        path = os.pathsep.join(filter(None, (*before, str(folder))))
        with mock.patch.dict(os.environ, PYTHONPATH=path):
            yield
