"""Transfers of KV blocks: their queues, and the hooks of the connector's worker half."""
