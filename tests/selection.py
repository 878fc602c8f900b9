"""Which cases of a script the tests that pytest has selected need."""


def cases(request, *functions, argument="case", **others):
    """Returns the cases that the selected tests of a module look at, so that no others are run.

    A test looks at the case that it is parametrized with, and at those that its mark names, as in
    `@pytest.mark.cases("on_batch")`. With `others=True` it looks at whatever cases there are: those
    that it names are for when it is run alone.

    Args:
        request: pytest's, of a fixture whose scope is the module.
        *functions: Names of the test functions; all of the module if there are none.
        argument: What the parameter is called.
        **others: What other parameters of the tests must be.

    Returns:
        A list without duplicates, in the order of the tests.
    """
    found, alone = {}, {}
    for item in request.session.items:
        # With xdist, a process knows of the tests of all processes.
        if item.path != request.path or (functions and item.originalname not in functions):
            continue
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if others.items() <= parameters.items():
            names = [parameters[argument]] if argument in parameters else []
            found |= dict.fromkeys(names)
            for mark in item.iter_markers("cases"):
                (alone if mark.kwargs.get("others") else found).update(dict.fromkeys(mark.args))
    return list(found or alone)
