"""Let NeMo RL's workers import this package, which is not installed in their environments."""

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
    """Append a folder that holds the package to PYTHONPATH, which NeMo RL passes to Ray and to every actor it starts.

    From a checkout the folder is its root. An installed package lies beside other packages, which would take the place
    of those in the workers' environments; then the folder is a temporary one, on this node, with a link to this package
    alone.
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
