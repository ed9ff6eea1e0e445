"""Tests for extensions of Longshore, to be run by their authors with pytest.

`longshore.testing.connectors` tests a connector. The code is in the folder `deploy/testing/`, but
its only name is `longshore.testing`.
"""

if __name__ != "longshore.testing":
    raise ImportError(f"import longshore.testing, not {__name__}: that loads a second copy")
