"""The disk tier's storage: KV blocks of fixed size in segment files, with a crash-safe index."""
