"""`python -m nemo_fp8rl` is `nemo-fp8rl`."""

import sys

from nemo_fp8rl.cli import main

if __name__ == "__main__":
    sys.exit(main())
