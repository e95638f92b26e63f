"""How the bundled model tiny-hybrid was made: its tokenizer, network, rows of data, and training."""
