"""Remote tiers: KV blocks in an object store or in Redis, which engines share."""
