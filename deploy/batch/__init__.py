"""Files of requests, a line each, in OpenAI's format: their lines, and running them."""
