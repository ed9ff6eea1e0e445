"""Ollama's API: its requests become chats, and the answers lines of JSON."""
