"""Which blocks each request holds, which are free, and which prefix is cached in them."""
