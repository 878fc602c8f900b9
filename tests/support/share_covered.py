"""Prints how many of the statements that one run executes another one executes as well.

share_covered.py PART WHOLE

Each is a data file of coverage, of which the second has the lines of the first, too.
"""

import sys

import coverage


def executed(path):
    """Lines that were executed, as pairs of a file and a number."""
    data = coverage.CoverageData(path)
    data.read()
    return {(file, line) for file in data.measured_files() for line in data.lines(file)}


def main(part, whole):
    """Prints both numbers of lines, and their ratio."""
    few, all_of_them = executed(part), executed(whole)
    share = 100 * len(few & all_of_them) / len(all_of_them)
    print(f"{len(few)} of {len(all_of_them)} lines: {share:.1f} %")


if __name__ == "__main__":
    main(*sys.argv[1:])
