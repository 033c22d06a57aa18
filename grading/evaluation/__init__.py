"""How good grades are, beside people's: what `kvasir evaluate` measures."""
