"""A library that a connector of tests imports only when it begins."""

print("the late library is imported", flush=True)
