"""What only some requests use: forks, transfers, grammars, drafts, adapters, encoders, sessions."""
