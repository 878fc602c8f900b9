"""Parameters of tests that `make test` leaves out and `make test-all` runs.

```python
@pytest.mark.parametrize("name", ["adam", *extended("nadam", "ftrl")])
```

The markers: `extended` is not in `make test`: on one more combination, optimizer, kind of data or
fault, it says what a test of `make test` says of the path that they share. `processes` is not in
`make test-fast`: it starts processes or servers, or trains for seconds.
"""

import pytest


def extended(*values, **named):
    """Values of a parameter, each marked as extended.

    Args:
        *values: The values; a tuple is those of several parameters.
        **named: `marks` for further marks.

    Returns:
        A list for `pytest.mark.parametrize`.
    """
    marks = [pytest.mark.extended, *named.get("marks", ())]
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks)
        for value in values
    ]
