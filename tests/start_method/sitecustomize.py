"""With this folder in PYTHONPATH, Python starts processes as START_METHOD says: spawn, as on macOS, or forkserver, as
on Linux from Python 3.14."""

import multiprocessing
import os

multiprocessing.set_start_method(os.environ.get("START_METHOD"), force=True)
