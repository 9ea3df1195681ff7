"""Builds the package as pyproject.toml says, and with DUALPATH_COMPILE=1 the modules of the policy that
every event passes through as C extensions (mypyc). Their sources stay beside them, and are what runs
where nothing is compiled.
"""

import os
import sys

from setuptools import setup

# Events and settings are msgspec structs, and `quota` is compiled by the simulator (numba): they stay Python.
MODULES = (
    "cluster",
    "decode_choice",
    "membership",
    "placement",
    "planning",
    "prefill_choice",
    "read_plan",
    "requests",
    "scheduler",
    "splitmix",
    "stats",
)
COMPILE = os.environ.get("DUALPATH_COMPILE") == "1"
# pip asks first what is needed, when it is not there yet.
ASKED = not {"egg_info", "dist_info"}.isdisjoint(sys.argv)

extensions = []
if COMPILE and not ASKED:
    from mypyc.build import mypycify

    extensions = mypycify(
        [f"src/dualpath/policy/{each}.py" for each in MODULES], group_name="dualpath_policy"
    )

setup(
    ext_modules=extensions,
    # All anew: each extension is then younger than its source, which importing the policy demands.
    options={"build_ext": {"force": True}},
    # Besides mypy, what the policy imports.
    setup_requires=["mypy>=2.4", "msgspec>=0.19"] if COMPILE and ASKED else [],
)
