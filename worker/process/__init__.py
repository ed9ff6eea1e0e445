"""The process around a rank: start-up, the loop, the host it runs on."""
