"""`longshore simulate`: the real scheduler, tiers and router, with a simulated worker and clock."""
