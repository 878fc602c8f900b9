"""Page faults of large blocks that are freed and taken again: page_faults.py FUNCTION MEBIBYTES.

Calls a function of `memory.py`, without the rest of the library, and prints what it returns, and
faults as a part of a block's pages.
"""

import pathlib
import resource
import runpy
import sys

MEMORY = pathlib.Path(__file__).parents[2] / "keras_psplus" / "cluster" / "process" / "memory.py"
PAGE = resource.getpagesize()


def faults_of_a_block(mebibytes):
    """The least page faults of some blocks, each of which is freed before the next.

    Another thread may take a part of what was freed, so that the next block does not fit there.
    """
    found = []
    for _ in range(6):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        bytes(range(1, 256)) * ((mebibytes << 20) // 255)  # written to the end
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(found[1:])


if __name__ == "__main__":
    functions, mebibytes = runpy.run_path(str(MEMORY)), int(sys.argv[2])
    functions["keep_freed_memory"]()
    told = functions[sys.argv[1]]()
    print(told, faults_of_a_block(mebibytes) / ((mebibytes << 20) // PAGE))
