import gc


def pytest_collection_finish():
    """What the imports left is no garbage: every run of a trainer collects, and would look at all of it each time."""
    gc.collect()
    gc.freeze()
