"""Tests of many small cases that are one item for pytest, whose collection costs time."""

import functools
import inspect

import pytest


def for_each(names, values, ids=repr):
    """Decorates a test to run for each value in turn, and to fail once with all that fail.

    It stands where `pytest.mark.parametrize` would, for cases of milliseconds. All cases share the
    test's fixtures.

    Args:
        names: Names of the parameters, separated by commas.
        values: Values; tuples if there are several names.
        ids: Function of a value that names it in a failure.
    """
    names, values = [name.strip() for name in names.split(",")], list(values)

    def decorate(test):
        @functools.wraps(test)
        def run(**given):
            errors = []
            for value in values:
                case = dict(zip(names, value, strict=True) if len(names) > 1 else [(*names, value)])
                try:
                    test(**given, **case)
                except (Exception, pytest.fail.Exception) as error:
                    error.add_note(f"In the case {ids(value)}")
                    errors.append(error)
            if len(errors) == 1:
                raise errors[0]
            if errors:
                raise BaseExceptionGroup(f"{len(errors)} of {len(values)} cases", errors)

        assert values, "no cases"
        signature = inspect.signature(test)
        rest = [one for name, one in signature.parameters.items() if name not in names]
        run.__signature__ = signature.replace(parameters=rest)
        return run

    return decorate
